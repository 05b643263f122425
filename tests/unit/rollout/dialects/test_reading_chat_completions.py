"""Bodies of POST /v1/chat/completions and what they ask for."""

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
from realsys.rollout.dialects import chat_completions

HI = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}


def read(headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    body = {"messages": [HI], **fields}
    return chat_completions.read(json.dumps(body).encode(), headers or {})


def refusal(**fields: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(**fields)
    assert caught.value.fix
    return caught.value


def test_the_smallest_request() -> None:
    assert read() == ChatRequest(messages=(ChatMessage(role="user", content="hi"),))


def test_every_role_and_form_of_content() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"a": 1}'},
    }
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
        },
        {"role": "user", "content": "weather?", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
            "reasoning": "bad",
        },
        {"role": "assistant", "refusal": "never"},
    ]
    assert read(messages=messages).messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="developer", content="be kind"),
        ChatMessage(role="user", content="weather?"),
        ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id="c1", name="weather", arguments='{"a": 1}'),),
        ),
        ChatMessage(role="tool", content="sunny", tool_call_id="c1", name="weather"),
        ChatMessage(role="assistant", content="no", reasoning="bad"),
        ChatMessage(role="assistant", content="never"),
    )


def test_a_tool_message_keeps_the_name_that_the_client_gave_it() -> None:
    tool = {"role": "tool", "content": "x", "tool_call_id": "c9", "name": "clock"}
    assert read(messages=[tool]).messages[0].name == "clock"
    assert read(messages=[{**tool, "name": None}]).messages[0].name == ""


def test_reasoning_in_another_servers_form_is_ignored() -> None:
    message = {"role": "assistant", "content": "a", "reasoning": {"effort": "low"}}
    assert read(messages=[message]).messages == (ChatMessage(role="assistant", content="a"),)


def test_numbers_and_switches() -> None:
    request = read(
        model="policy",
        n=3,
        max_tokens=5,
        max_completion_tokens=7,
        stop="END",
        logprobs=True,
        top_logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    assert request.token_ids
    assert (request.model, request.n, request.max_tokens) == ("policy", 3, 7)
    assert (request.stop, request.logprobs) == (("END",), True)
    assert (request.stream, request.stream_usage) == (True, True)
    assert read(max_tokens=5, stop=["a", "", "b"]).max_tokens == 5
    assert read(stop=["a", "", "b"]).stop == ("a", "b")


def test_sampling_is_kept_as_it_was_written() -> None:
    given: dict[str, Any] = {
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.2,
    }
    sampling = read(**given, frequency_penalty=None).sampling
    assert sampling == given
    assert isinstance(sampling["temperature"], int)


def test_what_clients_send_besides_is_ignored() -> None:
    extra: dict[str, Any] = {
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    assert read(**extra, store=True, stream_options=None, tools=None) == read()


def test_tools_and_their_choice() -> None:
    assert read(tools=[WEATHER]).tools == (WEATHER,)
    nulls = {"description": None, "parameters": None, "strict": None}
    bare = {"type": "function", "function": {"name": "weather"}}
    assert read(tools=[{**bare, "function": {"name": "weather", **nulls}}]).tools == (bare,)
    assert read(tools=[WEATHER]).tool_choice is ToolChoice.AUTO
    assert read(tools=[WEATHER], tool_choice="required").tool_choice is ToolChoice.REQUIRED
    assert read(tools=[WEATHER], tool_choice="none").tool_choice is ToolChoice.NONE
    assert not read(tools=[WEATHER]).one_call
    assert read(tools=[WEATHER], parallel_tool_calls=False).one_call
    one = read(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert (one.tool_choice, one.tool_name) == (ToolChoice.ONE, "weather")


def test_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert read(response_format=wanted).schema == schema
    assert read(response_format={"type": "json_object"}).schema == {"type": "object"}
    assert read(response_format={"type": "text"}).schema is None


def test_headers_of_any_case() -> None:
    request = read({"X-Stainless-Retry-Count": "2", "IDEMPOTENCY-key": "k1"})
    assert (request.retries, request.idempotency_key) == (2, "k1")
    assert read({"x-stainless-retry-count": "many"}).retries == 0


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [HI] * 4097}, "messages"),
        ({"tools": [WEATHER] * 513}, "tools"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], where: str) -> None:
    assert refusal(**fields).where == where


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"content": "x"}, "messages[1]"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
            "messages[1].function_call",
        ),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]},
            "messages[1].tool_calls[0]",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[1].content[1]",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0]"),
    ],
)
def test_refused_messages_are_named(message: dict[str, Any], where: str) -> None:
    assert refusal(messages=[HI, message]).where == where


def test_4096_messages_512_tools_and_16_replies_are_served() -> None:
    request = read(messages=[HI] * 4096, tools=[WEATHER] * 512, n=16)
    assert (len(request.messages), len(request.tools), request.n) == (4096, 512, 16)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b"5", b'{"messages": [{"role": "\xff"}]}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(DataError) as caught:
        chat_completions.read(body, {})
    assert caught.value.where in ("body", "messages")


# ---- what other servers take besides ---------------------------------------------------------------

BEGUN = {"role": "assistant", "content": "It is"}
CALLS = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "weather"}}]}


def test_arguments_of_the_template() -> None:
    asked = read(chat_template_kwargs={"a": [1], "enable_thinking": True}, enable_thinking=False)
    assert asked.template_args == {"a": [1], "enable_thinking": True}
    assert read(enable_thinking=False).template_args == {"enable_thinking": False}
    assert read(reasoning_effort="low").template_hints == {"reasoning_effort": "low"}
    assert read(reasoning_effort="none").template_hints == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    assert read(reasoning={"enabled": False}).template_hints == {"enable_thinking": False}
    assert read(thinking={"type": "disabled"}).template_hints == {"enable_thinking": False}
    assert refusal(reasoning_effort="banana").where == "reasoning_effort"
    assert refusal(reasoning={"effort": 5}).where == "reasoning.effort"
    assert refusal(thinking={"type": "banana"}).where == "thinking.type"
    for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template"):
        assert refusal(chat_template_kwargs={name: 1}).where == f"chat_template_kwargs.{name}"
    assert refusal(chat_template_kwargs=[1]).where == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "continues", "count"),
    [
        ({"messages": [HI, BEGUN]}, False, 2),
        ({"messages": [HI, BEGUN], "continue_final_message": True}, True, 2),
        ({"messages": [HI, BEGUN], "continue_final_message": False}, False, 2),
        (
            {
                "messages": [HI, BEGUN],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            True,
            2,
        ),
        ({"messages": [HI, BEGUN], "add_generation_prompt": True}, False, 2),
        ({"messages": [HI, {**BEGUN, "prefix": True}]}, True, 2),
        ({"messages": [HI, {**BEGUN, "partial": True}]}, True, 2),
        ({"messages": [HI, {**BEGUN, "content": "", "prefix": True}]}, False, 1),
    ],
)
def test_the_last_message_goes_on_where_the_client_says_so(
    fields: dict[str, Any], continues: bool, count: int
) -> None:
    asked = read(**fields)
    assert (asked.continues, len(asked.messages)) == (continues, count)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [HI, CALLS], "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [HI, BEGUN], "continue_final_message": 1},
            "continue_final_message",
        ),
        (
            {
                "messages": [HI, BEGUN],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "add_generation_prompt",
        ),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [HI, {**BEGUN, "prefix": True}, HI]}, "messages[1].prefix"),
        ({"messages": [{**HI, "prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{**BEGUN, "content": "", "prefix": True}]}, "messages[0].prefix"),
        (
            {"messages": [HI, {**BEGUN, "prefix": True}], "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        (
            {"messages": [HI, {**BEGUN, "partial": True}], "continue_final_message": False},
            "continue_final_message",
        ),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"n_predict": 0}, "n_predict"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"n_probs": 3}, "n_probs"),
        ({"skip_special_tokens": True}, "skip_special_tokens"),
    ],
)
def test_what_would_be_ignored_is_refused(fields: dict[str, Any], where: str) -> None:
    assert refusal(**fields).where == where


def test_what_changes_nothing_is_taken() -> None:
    plain = read()
    assert read(guided_json=None, guided_regex="", guided_choice=[]) == plain
    assert read(structured_outputs={"regex": None, "disable_any_whitespace": True}) == plain
    assert read(add_special_tokens=False) == plain
    assert read(return_token_ids=False, documents=[]) == plain
    assert read(skip_special_tokens=False, chat_template_kwargs={}) == plain
    assert read(include_reasoning=True, truncate_prompt_tokens=-1, echo=False) == plain
    assert read(ignore_eos=True, stop_token_ids=[3]).sampling == {
        "ignore_eos": True,
        "stop_token_ids": [3],
    }
