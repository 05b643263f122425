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
LISTENING = b"L"  # from a box, with the descriptor of the socket


class BoxProgram(msgspec.Struct, frozen=True, kw_only=True):
    """One program that a box runs."""

    argv: list[str]
    stdin: bytes


class BoxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Programs to run one after another. Names of files are relative to the work folder."""

    programs: list[BoxProgram]
    files: dict[str, bytes]
    env: dict[str, str]
    collect: list[str]
    folders: list[str]  # further writable ones
    archive: list[str]  # writable folders to pack at the end
    limits: dict[str, int | float]
    stop_after: list[str]  # ways to end after which no further program is run
    anew: bool = False  # each program finds ``files`` and no others
    listens: bool = False  # first its channel gets LISTENING, with a socket that listens in the box


class ProgramReply(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of BoxOutcome but for the files."""

    ended: str
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float


class BoxReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the programs did that were run, or why the box failed."""

    failure: str = ""
    is_doubtful: bool = (
        False  # another program of the job may be meant: it counts if it comes twice
    )
    outcomes: list[ProgramReply] = []
    files: dict[str, bytes] = {}
    archive: bytes | None = None


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


def prepare_codec() -> None:
    """Builds the codec of requests and replies, so that boxes cloned later need not."""
    empty = BoxRequest(
        programs=[],
        files={},
        env={},
        collect=[],
        folders=[],
        archive=[],
        limits={},
        stop_after=[],
    )
    msgspec.msgpack.decode(msgspec.msgpack.encode(empty), type=BoxRequest)
    msgspec.msgpack.encode(BoxReply())


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Writes a message; blocks as the socket's time-out says."""
    body = msgspec.msgpack.encode(message)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, kind: type[Any], most_bytes: int, *, head: bytes = b"") -> Any:
    """Reads one message of type ``kind``.

    Args:
        head: its first bytes, if they have been read.
    Raises:
        EOFError: the other end closed before its end. ValueError: it is longer, or no such message.
        TimeoutError: as the socket's time-out says.
    """
    (length,) = _LENGTH.unpack(head + _exactly(channel, _LENGTH.size - len(head)))
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
