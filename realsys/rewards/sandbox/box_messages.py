"""Messages between sandbox.py, the fork server and a box.

The fork server reads none of the payload: the box does, after it was cloned. So nothing of one box
is left in memory that another is cloned from.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

_LENGTH = struct.Struct("<Q")
RUN, KILL = b"R", b"K"  # to the fork server, with the number of the box: NUMBER
NUMBER = struct.Struct("<Q")


class BoxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One program to run. Names of files are relative to the work folder."""

    argv: list[str]
    files: dict[str, bytes]
    stdin: bytes
    env: dict[str, str]
    collect: list[str]
    limits: dict[str, int | float]


class BoxReply(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of BoxOutcome, or why the box failed."""

    failure: str = ""
    ended: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    files: dict[str, bytes] = {}


class ServerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the fork server."""

    worker_pid: int
    read_only: list[str]  # folders shown in every box, besides the system's
    preload: list[str]  # modules that warm Python has imported
    without: list[str]  # features that need not be there


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer: ``failure`` if no box can be started."""

    failure: str = ""
    missing: list[str] = []  # features without which it runs


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Writes a message; blocks as the socket's time-out says."""
    body = msgspec.msgpack.encode(message)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, kind: type[Any], most_bytes: int) -> Any:
    """Reads one message of type ``kind``.

    Raises:
        EOFError: the other end closed before its end. ValueError: it is longer, or no such message.
        TimeoutError: as the socket's time-out says.
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > most_bytes:
        raise ValueError(f"a message of {length:,} bytes; at most {most_bytes:,} are taken")
    return msgspec.msgpack.decode(_exactly(channel, length), type=kind)


def _exactly(channel: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        piece = channel.recv(min(length - len(received), 1 << 20))
        if not piece:
            raise EOFError(f"the connection ended after {len(received)} of {length} bytes")
        received += piece
    return bytes(received)
