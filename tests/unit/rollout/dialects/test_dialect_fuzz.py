"""Whatever a client sends: a request comes of it, or a DataError that tells what to do."""

from __future__ import annotations

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
        assert answer.messages
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


@pytest.mark.parametrize("path", DIALECTS)
@settings(max_examples=150, deadline=None)
@given(body=st.one_of(BODIES, VALUES))
def test_json_of_any_kind(path: str, body: Any) -> None:
    answered(DIALECTS[path], json.dumps(body).encode(), {})


@pytest.mark.parametrize("path", DIALECTS)
@settings(max_examples=100, deadline=None)
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
