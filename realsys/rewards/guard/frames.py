"""Frames over the pipes between guarded.py and its host process: length, number of the call, kind, bytes.

Nothing here reads the bytes: what comes from the fork of an answer is JSON at best.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any, NamedTuple

_HEADER = struct.Struct("<IQc")
# Kinds of frames
START, HELLO, BROKEN, CALL, RESULT, ENDED = b"S", b"H", b"B", b"C", b"R", b"E"
LONGEST_REPLY = 4 << 20  # bytes, of one call


class Frame(NamedTuple):
    """One message; ``number`` is that of the call."""

    number: int
    kind: bytes
    body: bytes


def send(descriptor: int, frame: Frame) -> None:
    """Writes the whole frame; blocks while the pipe is full."""
    left = memoryview(_HEADER.pack(len(frame.body), frame.number, frame.kind) + frame.body)
    while left:
        left = left[os.write(descriptor, left) :]


def parse(received: bytearray) -> Frame | None:
    """Removes and returns the first frame of ``received``; None while it is incomplete."""
    if len(received) < _HEADER.size:
        return None
    length, number, kind = _HEADER.unpack_from(received)
    end = _HEADER.size + length
    if len(received) < end:
        return None
    body = bytes(received[_HEADER.size : end])
    del received[:end]
    return Frame(number, kind, body)


def send_json(descriptor: int, message: dict[str, Any]) -> None:
    """Writes a message between processes that trust each other."""
    send(descriptor, Frame(0, RESULT, json.dumps(message).encode()))


def parse_json(received: bytearray) -> dict[str, Any] | None:
    """Removes and returns the first message that ``send_json`` wrote; None while it is incomplete."""
    frame = parse(received)
    if frame is None:
        return None
    message: dict[str, Any] = json.loads(frame.body)
    return message
