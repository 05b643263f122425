"""Framing between guarded.py and guarded_process.py over a pipe: a length of four bytes, then JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Writes the whole message; blocks while the pipe is full."""
    body = json.dumps(message).encode()
    left = memoryview(_LENGTH.pack(len(body)) + body)
    while left:
        left = left[os.write(descriptor, left) :]


def parse(received: bytearray) -> dict[str, Any] | None:
    """Removes and returns the first message of ``received``; None while it is incomplete."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    message: dict[str, Any] = json.loads(received[_LENGTH.size : end])
    del received[:end]
    return message
