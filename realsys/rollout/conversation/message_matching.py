"""Which messages of a request are ones that the conversation has already (pure).

Clients send a conversation back as a list of messages, rarely byte for byte as they got it: arguments of
tool calls are parsed and written anew, white space is stripped, ``null`` becomes "". A message's *key* is
what has to be equal for two of them to be the same one; the keys of a list of messages are chained, so that
one lookup a message finds the longest known beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall


class MessageMatch(StrEnum):
    """How equal a message must be to one that the conversation has."""

    STRICT = "strict"  # every field, letter for letter
    TOOLS = "tools"  # tool calls as JSON values, text without white space around it
    CONTENT = "content"  # role and content alone, whatever tools were called


def path_keys(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    match: MessageMatch,
    args: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """Returns a key for each beginning of ``messages``, from none of them to all.

    Args:
        tools: templates show them at the very beginning, so other tools make another conversation.
        args: of the template, and so do these.
    """
    key = _digest(b"", json.dumps([list(tools), args or {}], sort_keys=True, default=str))
    keys = [key]
    for message in messages:
        key = key_behind(key, message, match)
        keys.append(key)
    return keys


def key_behind(key: bytes, message: ChatMessage, match: MessageMatch) -> bytes:
    """Returns the key of the messages of ``key`` and one more."""
    return _digest(key, _text_of(message, match))


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _text_of(message: ChatMessage, match: MessageMatch) -> str:
    m = message
    if match is MessageMatch.CONTENT:
        return json.dumps([m.role, m.content.strip()])
    calls = [_call(call, match) for call in m.tool_calls]
    if match is MessageMatch.TOOLS:
        return json.dumps([m.role, m.content.strip(), calls, m.tool_call_id])
    # Most clients don't send thoughts back, and their absence changes nothing
    return json.dumps([m.role, m.content, calls, m.tool_call_id, m.name])


def _call(call: ToolCall, match: MessageMatch) -> list[Any]:
    if match is MessageMatch.STRICT:
        return [call.id, call.name, call.arguments]
    return [call.id, call.name, canonical_json(call.arguments)]


def canonical_json(text: str) -> str:
    """Returns JSON text with sorted keys and no white space; text that is no JSON as it is.

    Numbers are compared by value: JavaScript writes 1.0 as 1.
    """
    try:
        value = json.loads(text, parse_float=_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value  # infinity is none
