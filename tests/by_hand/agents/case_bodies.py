"""Bodies of an outsider's cases: what stands for a long text, a deep schema, or a number of tokens."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

PIECE = 1 << 20
_NUMBER = re.compile(r"(?:(?:(\d+)\*)?N)?((?:[+-]?\d+)*)")


def number_of(text: str | int, context: int) -> int:
    """Returns the value of "N+100", "10*N", "N-10+100" or "12", where N is the context's length.

    >>> number_of("10*N", 7), number_of("N-10+100", 7), number_of("12", 7)
    (70, 97, 12)
    """
    found = _NUMBER.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"{text!r} is no number of tokens")
    times = int(found[1] or 1) * context if "N" in str(text) else 0
    return times + sum(map(int, re.findall(r"[+-]?\d+", found[2])))


def body_text(body: Any, context: int) -> str:
    """Returns a body's JSON with what its names of long things stand for."""
    text = json.dumps(body)
    for name, made in (
        ("$TEXT_OF_N_PLUS_100", lambda: json.dumps("7" * (context + 100))),
        ("$IDS_OF_LENGTH_N_PLUS_7", lambda: json.dumps([65] * (context + 7))),
        ("$TOOLS_OF_N_TOKENS", lambda: json.dumps(_tools(context))),
    ):
        if name in text:
            text = text.replace(f'"{name}"', made())
    text = re.sub(r'"\$NEST:properties\.x:(\d+)"', lambda m: _nested(int(m[1])), text)
    return re.sub(
        r'"\$ENUM:(\d+)"', lambda m: json.dumps([f"name {i}" for i in range(int(m[1]))]), text
    )


def _tools(context: int) -> list[dict[str, Any]]:
    one = {"type": "object", "properties": {"a": {"type": "integer"}}}
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": "7" * (context // 100),
                "parameters": one,
            },
        }
        for i in range(100)
    ]


def _nested(levels: int) -> str:
    return '{"type": "object", "properties": {"x": ' * levels + '{"type": "object"}' + "}}" * levels


def pieces_of_bytes(text: str) -> tuple[Callable[[], AsyncIterator[bytes]], int]:
    """Returns what makes the pieces of a body with $FILL_BYTES:1GiB in it, and their bytes together."""
    before, _, behind = text.partition("$FILL_BYTES:1GiB")
    size = 1 << 30

    async def made() -> AsyncIterator[bytes]:
        yield before.encode()
        for _ in range(size // PIECE):
            yield b"x" * PIECE
        yield behind.encode()

    return made, len(before.encode()) + size + len(behind.encode())


@cache
def gzip_of_zeros(size: int) -> bytes:
    """Returns a gzip stream that unpacks to so many zeros, without packing them all."""
    block = 100_000_000
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(bytes(block)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + packed * (size // block)
