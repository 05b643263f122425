"""Input items of Responses → messages (pure).

One reply of the policy is several items there: its reasoning, its message and each of its calls. In a row
they are one turn, and become one assistant message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.dialects import body_fields
from realsys.rollout.dialects.body_fields import refused
from realsys.rollout.dialects.turn_merger import TurnMerger

_ROLES = ("system", "developer", "user", "assistant")


class InputItem(msgspec.Struct):
    """An item of the input; which of the fields it has depends on its type. No type: a message."""

    type: str | None = None
    role: str | None = None
    content: body_fields.Content | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: body_fields.Content | None = None


class ReasoningPart(msgspec.Struct):
    """A part of a reasoning item."""

    text: str


def add_items(merger: TurnMerger, items: Sequence[dict[str, Any]]) -> None:
    """Adds the messages of all items, in their order. Raises DataError for items that aren't served."""
    for i, raw in enumerate(items):
        item = body_fields.converted(raw, InputItem, f"input[{i}]")
        merger.add(_message(item, f"input[{i}]"))


def _message(item: InputItem, where: str) -> ChatMessage:
    match item.type:
        case "message" | None:
            if item.role not in _ROLES:
                raise refused(
                    "an item without type and role"
                    if item.role is None
                    else f"role {item.role!r} is unknown",
                    where=f"{where}.role",
                    fix=f"use one of {', '.join(_ROLES)}",
                )
            content = body_fields.joined_text(item.content, f"{where}.content")
            return ChatMessage(role=item.role, content=content)
        case "reasoning":
            return ChatMessage(role="assistant", reasoning=_thoughts(item, where))
        case "function_call":
            if item.call_id is None or item.name is None:
                raise refused(
                    "a function_call without call_id or name", where=where, fix="send both"
                )
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments or "")
            return ChatMessage(role="assistant", tool_calls=(call,))
        case "function_call_output":
            if item.call_id is None:
                raise refused(
                    "an output without it", where=f"{where}.call_id", fix="send the call's id"
                )
            output = body_fields.joined_text(item.output, f"{where}.output")
            return ChatMessage(role="tool", content=output, tool_call_id=item.call_id)
        case "item_reference":
            raise refused(
                f"this endpoint keeps no items, which an {item.type} needs",
                where=where,
                fix="send the item itself",
            )
    raise refused(
        f"an item of type {item.type!r} is not served",
        where=where,
        fix="send message, reasoning, function_call and function_call_output items",
    )


def _thoughts(item: InputItem, where: str) -> str:
    """Returns the text of a reasoning item, or its summary if the client left the text out."""
    if isinstance(item.content, str):
        return item.content
    name, parts = ("content", item.content) if item.content else ("summary", item.summary)
    texts = [
        body_fields.converted(part, ReasoningPart, f"{where}.{name}[{i}]").text
        for i, part in enumerate(parts or ())
    ]
    return "".join(texts)
