"""A record's value, which may be a list of messages, as a rule or a judge reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def readable_text(value: Any) -> str:
    """Returns a prompt, or another value, as text: messages with their roles; what is no text is JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(m, Mapping) for m in value):
        messages = [m for m in value if "content" in m]
        if len(messages) == len(value):
            return "\n\n".join(f"{m.get('role', '')}: {_content(m['content'])}" for m in messages)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _content(content: Any) -> str:
    """Returns the text of a message; of parts, that of each, or its kind: a judge sees no pictures."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        parts = (part.get("text", f"[{part.get('type', 'part')}]") for part in content)
        return "\n".join(map(str, parts))
    return "" if content is None else readable_text(content)
