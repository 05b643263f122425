"""Bodies of POST /v1/responses and what they ask for."""

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
from realsys.rollout.dialects import responses_api

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


def read(**fields: Any) -> ChatRequest:
    body = {"input": "hi", **fields}
    return responses_api.read(json.dumps(body).encode(), {"Idempotency-Key": "k"})


def test_a_text_is_a_users_message_and_instructions_come_first() -> None:
    request = read(
        instructions="be brief", model="policy", max_output_tokens=9, stream=True, store=True
    )
    assert request == ChatRequest(
        messages=(
            ChatMessage(role="system", content="be brief"),
            ChatMessage(role="user", content="hi"),
        ),
        model="policy",
        max_tokens=9,
        stream=True,
        schema_field="text.format",
        idempotency_key="k",
    )


def test_the_items_of_one_turn_become_one_message() -> None:
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "wait"}],
        },
        CALL,
        {**CALL, "call_id": "c2", "arguments": '{"b":2}'},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "1"}],
        },
        {"role": "assistant", "content": "done"},
        {"type": "message", "role": "developer", "content": "be kind"},
        {"role": "assistant", "content": "yes"},
    ]
    assert read(input=items).messages == (
        ChatMessage(role="user", content="ab"),
        ChatMessage(
            role="assistant",
            content="wait",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="c1", name="weather", arguments="{}"),
                ToolCall(id="c2", name="weather", arguments='{"b":2}'),
            ),
        ),
        ChatMessage(role="tool", content="2", tool_call_id="c2", name="weather"),
        ChatMessage(role="tool", content="1", tool_call_id="c1", name="weather"),
        ChatMessage(role="assistant", content="done"),
        ChatMessage(role="developer", content="be kind"),
        ChatMessage(role="assistant", content="yes"),
    )


def test_a_summary_stands_for_reasoning_whose_text_the_client_left_out() -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    item = {"type": "reasoning", "id": "r", "summary": summary, "encrypted_content": None}
    assert read(input=[item]).messages == (ChatMessage(role="assistant", reasoning="in short"),)


def test_flat_tools_become_those_of_chat_completions() -> None:
    request = read(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert request.tools == (
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    )
    assert (request.tool_choice, request.tool_name) == (ToolChoice.ONE, "weather")
    assert read(tools=[WEATHER], tool_choice="required").tool_choice is ToolChoice.REQUIRED
    assert not read(tools=[WEATHER]).one_call
    assert read(tools=[WEATHER], parallel_tool_calls=False).one_call


def test_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"}
    assert read(text=wanted).schema == schema
    assert read(text=wanted).schema_field == "text.format"
    assert read(text={"format": {"type": "json_object"}}).schema == {"type": "object"}
    assert read(text={"format": {"type": "text"}}).schema is None
    assert read(text={"verbosity": "low"}).schema is None


def test_logprobs_are_asked_for_by_include() -> None:
    assert read(include=["message.output_text.logprobs"]).logprobs
    assert not read(include=["reasoning.encrypted_content"]).logprobs


def test_what_clients_send_besides_is_ignored() -> None:
    extra = {"metadata": {}, "truncation": "auto", "prompt_cache_key": "x", "reasoning": {}}
    assert read(**extra, background=False, previous_response_id=None, top_logprobs=0) == read()


def test_arguments_and_hints_of_the_template() -> None:
    assert read(reasoning={"effort": "low"}).template_hints == {"reasoning_effort": "low"}
    hints = {"reasoning_effort": "none", "enable_thinking": False}
    assert read(reasoning={"effort": "none"}).template_hints == hints
    assert read(enable_thinking=True).template_args == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"background": True}, "background"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [CALL] * 4097}, "input"),
        ({"tools": [WEATHER] * 513}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [WEATHER, {"type": "custom", "name": "patch"}]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"content": ""}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary[0]"),
    ],
)
def test_refused_fields_are_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError) as caught:
        read(**fields)
    assert caught.value.where == where
    assert caught.value.fix
