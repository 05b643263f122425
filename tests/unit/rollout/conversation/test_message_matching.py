"""Which messages count as the same one, by each way of matching."""

from __future__ import annotations

from typing import Any

import pytest

from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.conversation.message_matching import (
    MessageMatch,
    canonical_json,
    path_keys,
)

STRICT, TOOLS, CONTENT = MessageMatch.STRICT, MessageMatch.TOOLS, MessageMatch.CONTENT


def said(content: str = "", *arguments: str, role: str = "assistant", **more: Any) -> ChatMessage:
    calls = tuple(ToolCall(id=f"c{i}", name="f", arguments=a) for i, a in enumerate(arguments))
    return ChatMessage(role=role, content=content, tool_calls=calls, **more)


def same(a: ChatMessage, b: ChatMessage) -> set[MessageMatch]:
    """The ways by which two messages are one."""
    return {m for m in MessageMatch if path_keys([a], (), m) == path_keys([b], (), m)}


@pytest.mark.parametrize(
    ("a", "b", "ways"),
    [
        (said("hi"), said("hi"), {STRICT, TOOLS, CONTENT}),
        (said("hi"), said(" hi\n"), {TOOLS, CONTENT}),
        (said("hi"), said("hi!"), set()),
        (said("hi"), said("hi", role="user"), set()),
        (said("", '{"a":1, "b": 2}'), said("", '{"b": 2,"a": 1}'), {TOOLS, CONTENT}),
        (said("", '{"a": 1}'), said("", '{"a": 2}'), {CONTENT}),
        (said("", '{"a": 1.0}'), said("", '{"a": 1}'), {TOOLS, CONTENT}),
        (said("", '{"a": "1"}'), said("", '{"a": 1}'), {CONTENT}),
        (said("", '{"a": true}'), said("", '{"a": 1}'), {CONTENT}),
        (said("", '{"a": "é"}'), said("", '{"a": "\\u00e9"}'), {TOOLS, CONTENT}),
        (said("", "{no json"), said("", "{ no json"), {CONTENT}),
        (said("", "{}"), said(""), {CONTENT}),
        (said("hi", reasoning="so"), said("hi"), {STRICT, TOOLS, CONTENT}),
        (said("x", role="tool", name="f"), said("x", role="tool"), {TOOLS, CONTENT}),
        (said("x", role="tool", tool_call_id="1"), said("x", role="tool"), {CONTENT}),
        (said("e\u0301"), said("é"), set()),  # the same letter to the eye, not to a tokenizer
    ],
)
def test_what_makes_two_messages_one(
    a: ChatMessage, b: ChatMessage, ways: set[MessageMatch]
) -> None:
    assert same(a, b) == ways


def test_there_is_a_key_for_each_beginning() -> None:
    one, two = said("1", role="user"), said("2")
    keys = path_keys([one, two], (), TOOLS)
    assert len(set(keys)) == 3
    assert path_keys([one], (), TOOLS) == keys[:2]
    assert path_keys([two, one], (), TOOLS)[2] != keys[2]


def test_texts_do_not_flow_into_one_another() -> None:
    a = path_keys([said("ab", role="user"), said("c")], (), TOOLS)[2]
    assert a != path_keys([said("a", role="user"), said("bc")], (), TOOLS)[2]


def test_other_tools_are_another_conversation_and_their_fields_order_is_none() -> None:
    f, g = {"name": "f", "x": 1}, {"name": "g"}
    keys = path_keys([said("1")], [f, g], TOOLS)
    assert keys == path_keys([said("1")], [{"x": 1, "name": "f"}, g], TOOLS)
    assert not set(keys) & set(path_keys([said("1")], [f], TOOLS))
    assert not set(keys) & set(path_keys([said("1")], [g, f], TOOLS))


def test_half_a_letter_has_a_key() -> None:
    assert same(said("\ud83d"), said("\ud83d")) == {STRICT, TOOLS, CONTENT}
    assert same(said("\ud83d"), said("\ud83e")) == set()


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('{"b": 1.0, "a": [2.50, 1e2]}', '{"a":[2.5,100],"b":1}'),
        ("1e999", "Infinity"),
        ("-0.0", "0"),
        ("NaN", "NaN"),
        ("{", "{"),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),  # more digits than Python reads
        ("", ""),
    ],
)
def test_json_is_compared_by_value(text: str, canonical: str) -> None:
    assert canonical_json(text) == canonical
