"""Server-sent events, and what all encoders of streams share (pure)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from realsys.api.errors import InternalError

COMMENT = b": ping\n\n"  # a comment: parsers of event streams skip it
DONE = b"data: [DONE]\n\n"


def encoded(value: Any) -> bytes:
    """Encodes JSON values, also of text with half of a surrogate pair, which UTF-8 can't hold."""
    try:
        return bytes(msgspec.json.encode(value))
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()  # escapes all but ASCII


def data_event(data: Any) -> bytes:
    """Encodes an event without a name."""
    return b"data: " + encoded(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """Encodes an event that has its ``type`` for a name."""
    return f"event: {data['type']}\n".encode() + data_event(data)


def unsent(whole: str, sent: Sequence[str]) -> str:
    """Returns the rest of a text after the parts that went out.

    Raises:
        InternalError: they are no beginning of it.
    """
    beginning = "".join(sent)
    if not whole.startswith(beginning):
        raise InternalError(
            f"{len(beginning)} characters of a reply were streamed that its final text of {len(whole)} "
            "does not begin with",
            where="StreamEncoder.closing",
        )
    return whole[len(beginning) :]
