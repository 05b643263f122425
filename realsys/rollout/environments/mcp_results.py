"""What calls of MCP servers come to, and what an episode is told of it (pure; without the SDK)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import WaitTimeout


class ServerAway(WaitTimeout):
    """A server can't be reached, or is overloaded: the policy can do nothing about it."""


class SessionLost(ServerAway):
    """A server knows the session no more, and did nothing of what it was asked."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a call came to. ``failed``: the tool, or the server on its behalf, says so in ``text``."""

    text: str
    failed: bool = False


def failed(why: str) -> ToolResult:
    """Returns what the policy is shown of a call that came to nothing."""
    return ToolResult(text=f"Error: {why}", failed=True)


def result_of(result: Any) -> ToolResult:
    """Returns the texts of a result's content, those of resources, too; other content by its kind, with its
    URI if it has one; structured content as JSON.
    """
    fields = result if isinstance(result, Mapping) else {}
    parts = [_shown(part) for part in fields.get("content") or () if isinstance(part, Mapping)]
    if not parts and fields.get("structuredContent") is not None:
        parts = [json.dumps(fields["structuredContent"], ensure_ascii=False)]
    return ToolResult(text="\n".join(parts), failed=bool(fields.get("isError")))


def _shown(part: Mapping[str, Any]) -> str:
    inner = part.get("resource")
    held = inner if isinstance(inner, Mapping) else part
    if held.get("text") is not None and part.get("type") in ("text", "resource"):
        return str(held["text"])
    return f"[{part.get('type')}] {held.get('uri') or ''}".strip()


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a listed tool in the form of Chat Completions."""
    function = {
        "name": str(tool["name"]),
        "description": str(tool.get("description") or ""),
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
