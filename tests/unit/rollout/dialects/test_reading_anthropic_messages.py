"""Bodies of POST /v1/messages and what they ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ToolCall,
    ToolChoice,
)
from realsys.rollout.dialects import anthropic_messages

HI = {"role": "user", "content": "hi"}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def read(**fields: Any) -> ChatRequest:
    body = {"messages": [HI], "max_tokens": 9, **fields}
    return anthropic_messages.read(json.dumps(body).encode(), {"x-stainless-retry-count": "1"})


def test_the_smallest_request() -> None:
    assert read(model="policy") == ChatRequest(
        messages=(ChatMessage(role="user", content="hi"),),
        model="policy",
        max_tokens=9,
        schema_field="output_config.format",
        retries=1,
    )


def test_a_request_to_count_tokens_has_no_limit() -> None:
    assert read(max_tokens=None).max_tokens is None
    assert anthropic_messages.count_tokens_body(17) == {"input_tokens": 17}


def test_the_system_prompt_is_text_or_blocks() -> None:
    system = ChatMessage(role="system", content="be brief")
    assert read(system="be brief").messages[0] == system
    blocks = [{"type": "text", "text": "be ", **CACHED}, {"type": "text", "text": "brief"}]
    assert read(system=blocks).messages[0] == system


def test_blocks_become_messages_and_results_come_before_the_users_text() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **CACHED}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "wait"},
                {
                    "type": "tool_use",
                    "id": "t1",
                    "name": "weather",
                    "input": {"z": "é", "a": [1, 2.5]},
                },
                {"type": "tool_use", "id": "t2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "go "},
                {"type": "tool_result", "tool_use_id": "t2", "content": "noon", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "sun"}],
                },
                {"type": "text", "text": "on"},
            ],
        },
        {"role": "assistant", "content": "one "},
        {"role": "assistant", "content": [{"type": "text", "text": "turn"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
    ]
    assert read(messages=messages).messages == (
        ChatMessage(role="user", content="ab"),
        ChatMessage(
            role="assistant",
            content="wait",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="t1", name="weather", arguments='{"z":"é","a":[1,2.5]}'),
                ToolCall(id="t2", name="clock", arguments="{}"),
            ),
        ),
        ChatMessage(role="tool", content="noon", tool_call_id="t2", name="clock"),
        ChatMessage(role="tool", content="sun", tool_call_id="t1", name="weather"),
        ChatMessage(role="user", content="go on"),
        ChatMessage(role="assistant", content="one turn"),
        ChatMessage(role="tool", tool_call_id="t1", name="weather"),
    )


def test_tools_become_those_of_chat_completions() -> None:
    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
    wanted = ({"type": "function", "function": function},)
    assert read(tools=[{**WEATHER, **CACHED}]).tools == wanted
    assert read(tools=[{**WEATHER, "type": "custom"}]).tools == wanted


@pytest.mark.parametrize(
    ("choice", "wanted", "name"),
    [
        (None, ToolChoice.AUTO, ""),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice.AUTO, ""),
        ({"type": "any"}, ToolChoice.REQUIRED, ""),
        ({"type": "none"}, ToolChoice.NONE, ""),
        ({"type": "tool", "name": "weather"}, ToolChoice.ONE, "weather"),
    ],
)
def test_tool_choices(choice: dict[str, Any] | None, wanted: ToolChoice, name: str) -> None:
    request = read(tools=[WEATHER], tool_choice=choice)
    assert (request.tool_choice, request.tool_name) == (wanted, name)
    assert request.one_call is bool(choice and "disable_parallel_tool_use" in choice)


def test_stops_sampling_and_schema() -> None:
    schema = {"type": "object"}
    request = read(stop_sequences=["END"], temperature=0.5, top_k=3, stream=True)
    assert (request.stop, request.stream) == (("END",), True)
    assert request.sampling == {"temperature": 0.5, "top_k": 3}
    wanted = {"type": "json_schema", "schema": schema}
    for fields, field in (
        ({"output_format": wanted}, "output_format"),
        ({"output_config": {"format": wanted}}, "output_config.format"),
    ):
        request = read(**fields)
        assert (request.schema, request.schema_field) == (schema, field)


def test_what_clients_send_besides_is_ignored() -> None:
    extra = {"metadata": {"user_id": "u"}, "context_management": {"edits": []}}
    assert read(**extra, service_tier="auto", mcp_servers=[], output_config={}) == read()


def test_wishes_for_thoughts_are_hints_to_the_template() -> None:
    for kind, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        asked = read(thinking={"type": kind, "budget_tokens": 1024})
        assert asked.template_hints == {"enable_thinking": thinks}
    asked = read(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert asked.template_hints == {"enable_thinking": True, "reasoning_effort": "low"}
    assert read(chat_template_kwargs={"a": 1}).template_args == {"a": 1}


@pytest.mark.parametrize(
    ("last", "continues", "count"),
    [
        ({"role": "assistant", "content": "It is"}, True, 2),
        ({"role": "assistant", "content": [{"type": "text", "text": "It is"}]}, True, 2),
        ({"role": "assistant", "content": ""}, False, 1),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "w", "input": {}}],
            },
            False,
            2,
        ),
    ],
)
def test_an_answer_that_was_begun_goes_on(
    last: dict[str, Any], continues: bool, count: int
) -> None:
    messages = [{"role": "user", "content": "hi"}, last]
    asked = read(messages=messages)
    assert (asked.continues, len(asked.messages)) == (continues, count)
    assert not read(messages=messages, continue_final_message=False).continues
    with pytest.raises(DataError):
        read(messages=messages[:1], continue_final_message=True)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI] * 4097}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [WEATHER] * 513}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        (user({"type": "image", "source": {}}), "messages[0].content[0]"),
        (user({"type": "document", "source": {}}), "messages[0].content[0]"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError) as caught:
        read(**fields)
    assert caught.value.where == where
    assert caught.value.fix
