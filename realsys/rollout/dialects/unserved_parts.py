"""Leaves out of requests the tools and parts of messages that a policy of text can't take (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from realsys.rollout.conversation.chat_messages import Unserved
from realsys.rollout.dialects.body_fields import LEFT_OUT, PART_KINDS, Content


class LeftOut:
    """Leaves out of one request what can't be served, and remembers what that was.

    Attributes:
        kinds: one for each tool and part that was left out, in the order in which they were met.
    """

    def __init__(self, unserved: Unserved) -> None:
        self._drops = unserved is Unserved.DROP
        self.kinds: list[str] = []

    def content(self, content: Content | None) -> Content | None:
        """Returns a content with a short text in place of each picture, sound and file."""
        if not self._drops or not isinstance(content, list):
            return content
        return [self._part(part) for part in content]

    def _part(self, part: Any, *, is_inner: bool = False) -> Any:
        if not isinstance(part, dict):
            return part
        kind = PART_KINDS.get(str(part.get("type")))
        if kind is not None:
            self.kinds.append(kind)
            return {"type": "text", "text": LEFT_OUT.format(kind=kind)}
        inner = part.get("content")  # of a tool's result, in Messages
        if is_inner or not isinstance(inner, list):
            return part
        return {**part, "content": [self._part(one, is_inner=True) for one in inner]}

    def tool(self, tool: Mapping[str, Any], served: Collection[str]) -> bool:
        """Returns whether a tool is left out: one of a type that is not among ``served``."""
        kind = tool.get("type")
        if not self._drops or not isinstance(kind, str) or kind in served:
            return False
        self.kinds.append(f"tool {kind}")
        return True

    def field(self, name: str, value: object) -> bool:
        """Returns whether a field of the body that asks for a tool of the server's is left out."""
        if not self._drops or value is None:
            return False
        self.kinds.append(name)
        return True
