"""Whatever a client sends: a request comes of it, or a DataError that tells what to do."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import ChatRequest
from realsys.rollout.dialects.dialect import DIALECTS, Dialect

# Words that lead deep into the readers.
KEYS = (
    *(
        "messages",
        "input",
        "system",
        "instructions",
        "role",
        "content",
        "type",
        "text",
        "tools",
        "name",
    ),
    *(
        "tool_choice",
        "function",
        "parameters",
        "input_schema",
        "tool_calls",
        "id",
        "arguments",
        "call_id",
    ),
    *(
        "output",
        "summary",
        "thinking",
        "tool_use_id",
        "stop",
        "stop_sequences",
        "n",
        "max_tokens",
        "format",
    ),
    *(
        "response_format",
        "json_schema",
        "schema",
        "stream",
        "stream_options",
        "include",
        "output_config",
    ),
    *("temperature", "logit_bias", "reasoning", "reasoning_content", "refusal", "tool_call_id"),
)
WORDS = (
    *(
        "user",
        "assistant",
        "system",
        "tool",
        "developer",
        "text",
        "input_text",
        "function",
        "message",
    ),
    *(
        "function_call",
        "function_call_output",
        "reasoning",
        "tool_use",
        "tool_result",
        "thinking",
        "auto",
    ),
    *("json_schema", "json_object", "any", "required", "refusal", "custom", ""),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=4),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=5),
    ),
    max_leaves=20,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(WORDS)},
        optional=dict.fromkeys(("text", "input", "id", "name"), VALUES),
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(WORDS)},
        optional={
            "type": st.sampled_from(WORDS),
            "content": st.one_of(st.text(max_size=3), PARTS, VALUES),
            "tool_calls": VALUES,
            "call_id": st.text(max_size=2),
            "output": VALUES,
        },
    ),
    max_size=4,
)
BODIES = st.fixed_dictionaries(
    {"messages": st.one_of(MESSAGES, VALUES), "input": st.one_of(MESSAGES, VALUES)},
    optional={key: VALUES for key in KEYS if key not in ("messages", "input")},
)


def answered(dialect: Dialect, body: bytes, headers: dict[str, str]) -> None:
    answer = read_or_refused(dialect, body, headers)
    if isinstance(answer, ChatRequest):
        assert answer.messages or answer.prompts
    else:
        assert answer.where
        assert answer.fix
        assert dialect.error(answer, 400)


def read_or_refused(
    dialect: Dialect, body: bytes, headers: dict[str, str]
) -> ChatRequest | DataError:
    try:
        return dialect.read(body, headers)
    except DataError as error:
        return error


@pytest.mark.thorough
@pytest.mark.parametrize("path", DIALECTS)
@settings(max_examples=30, deadline=None)
@given(body=st.one_of(BODIES, VALUES))
def test_json_of_any_kind(path: str, body: Any) -> None:
    answered(DIALECTS[path], json.dumps(body).encode(), {})


@pytest.mark.parametrize("path", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(
    body=st.binary(max_size=60), headers=st.dictionaries(st.text(max_size=30), st.text(max_size=5))
)
def test_bytes_of_any_kind(path: str, body: bytes, headers: dict[str, str]) -> None:
    answered(DIALECTS[path], body, headers)
    answered(DIALECTS[path], b'{"messages":[{"role":"user","content":' + body + b"}]}", headers)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_deep_nests(path: str, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    use = b'{"type":"tool_use","id":"t","name":"f","input":{"a":' + deep + b"}}"
    message = b'[{"role":"assistant","content":[' + use + b"]}]"
    answered(DIALECTS[path], b'{"messages":' + message + b',"input":' + message + b"}", {})
    answered(DIALECTS[path], b'{"messages":' + deep + b',"input":' + deep + b"}", {})


@pytest.mark.parametrize("count", ["٣", "²", "9" * 40, "-1", "", " 2 "])
def test_headers_that_are_no_small_numbers_count_as_none(count: str) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    request = DIALECTS["/v1/messages"].read(body, {"x-stainless-retry-count": count})
    assert request.retries == (2 if count == " 2 " else 0)


# Accepted bodies with as many fields as one can have.
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"a": {}}},
}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": "b",
                "reasoning_content": "c",
                "tool_calls": [CHAT_CALL],
            },
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": "d"},
        ],
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}},
        "stop": ["a"],
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1.5},
        "n": 2,
        "max_tokens": 3,
        "modalities": ["text"],
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "text", "text": "a"}],
            },
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"a": {}}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "schema": {"a": 1}}},
        "include": ["x"],
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": "{"}},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "a"}],
                    }
                ],
            },
        ],
        "tools": [{"type": "custom", "name": "f", "description": "d", "input_schema": {"a": {}}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}},
        "stop_sequences": ["a"],
        "max_tokens": 3,
    },
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of every value inside of ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, content in inner:
        found.append((value, key))
        if isinstance(content, dict | list):
            found += places(content)
    return found


@pytest.mark.parametrize("path", VALID)
def test_the_bodies_to_change_are_accepted(path: str) -> None:
    assert isinstance(
        read_or_refused(DIALECTS[path], json.dumps(VALID[path]).encode(), {}), ChatRequest
    )


OF_EACH_KIND: tuple[Any, ...] = (None, True, 7, 1.5, "x", [], [7], {}, {"a": 7})


@pytest.mark.parametrize("path", VALID)
def test_an_accepted_body_with_any_value_left_out_or_of_another_kind(path: str) -> None:
    for number in range(len(places(VALID[path]))):
        for value in (..., *OF_EACH_KIND):
            body = copy.deepcopy(VALID[path])
            container, key = places(body)[number]
            if value is ...:
                del container[key]
            else:
                container[key] = copy.deepcopy(value)
            answered(DIALECTS[path], json.dumps(body).encode(), {})


@pytest.mark.parametrize("path", VALID)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_accepted_body_with_one_value_changed(path: str, data: st.DataObject) -> None:
    body = copy.deepcopy(VALID[path])
    container, key = data.draw(
        st.sampled_from(range(len(places(body)))).map(places(body).__getitem__)
    )
    if data.draw(st.booleans()):
        container[key] = data.draw(VALUES)
    else:
        del container[key]
    answered(DIALECTS[path], json.dumps(body).encode(), {})
