"""An HTTP client on a bare socket that leaves, dawdles, resets and half-closes as an outsider's case says.

For outsider_endpoint.py. It notes what it has read of a reply: its text, thoughts, calls and events.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LONGEST_S = 140.0  # of one exchange


@dataclass(kw_only=True)
class RawRequest:
    """What is sent, and how.

    Attributes:
        pieces: of the body, in place of ``body``: made as they are sent. ``size``: of all; None: in chunks.
        bytes_per_s: of the body; ``half``: it stops at the middle.
        leave: when the client leaves, see the README; None: it does not. ``last_text``: characters.
        read_per_s: bytes; 0: nothing is read.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    api: str = "chat"
    method: str = "POST"
    http: str = "1.1"
    pieces: Callable[[], AsyncIterator[bytes]] | None = None
    size: int | None = None
    bytes_per_s: float | None = None
    half: bool = False
    half_close: bool = False
    reset: bool = False
    rcvbuf: int | None = None
    read_per_s: float | None = None
    leave: Any = None
    last_text: int = 0


@dataclass(kw_only=True)
class RawExchange:
    """What a client has read when it was done.

    Attributes:
        status: None: the connection was closed before there was one.
        texts, thoughts: by choice. calls: name, arguments and id of each that was there whole.
        left: it left on purpose. sent: bytes of the body that had been written by the answer's head.
    """

    api: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[tuple[str, Any]] = field(default_factory=list)
    raw_events: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    finished: bool = False
    left: bool = False
    seconds: float = 0.0
    sent: int = 0
    id: str = ""
    partial_call: bool = False
    answer: Any = None  # the body's JSON
    pieces_of_calls: dict[int, list[str]] = field(default_factory=dict)
    begun_block: list[str] = field(
        default_factory=list
    )  # name, arguments, id of a call of Messages

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def error(self) -> dict[str, Any]:
        found = self.answer.get("error") if isinstance(self.answer, dict) else None
        return found if isinstance(found, dict) else {}


class _Left(Exception):
    """The client leaves now."""


async def exchange(
    port: int, sent: RawRequest, *, asked: asyncio.Event, on_end: Callable[[], None]
) -> RawExchange:
    """Sends a request and reads its reply as far as the case says.

    Args:
        asked: set when the policy was asked. on_end: called when the client has closed.
    """
    got = RawExchange(api=sent.api)
    began = time.monotonic()
    sock = socket.socket()
    if sent.rcvbuf is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, sent.rcvbuf)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    slow = sent.read_per_s is not None
    reader, writer = await asyncio.open_connection(sock=sock, limit=256 if slow else 1 << 20)
    sending = asyncio.create_task(_send(writer, sent, got))
    try:
        with suppress(_Left, ConnectionError):
            async with asyncio.timeout(LONGEST_S):
                await _read(reader, sent, got, asked)
    except TimeoutError:
        pass
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        if sent.reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        on_end()
        with suppress(Exception):
            await writer.wait_closed()
    got.seconds = time.monotonic() - began
    if got.headers.get("content-type", "").startswith("application/json"):
        with suppress(ValueError):
            got.answer = json.loads(got.body)
            _read_whole(got)
    return got


async def _send(writer: asyncio.StreamWriter, sent: RawRequest, got: RawExchange) -> None:
    headers = {"host": "127.0.0.1", **sent.headers}
    chunked = sent.pieces is not None and sent.size is None
    if chunked:
        headers["transfer-encoding"] = "chunked"
    elif sent.method == "POST":
        headers["content-length"] = str(len(sent.body) if sent.size is None else sent.size)
    head = f"{sent.method} {sent.path} HTTP/{sent.http}\r\n"
    head += "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    writer.write(head.encode())
    if sent.bytes_per_s is not None:
        for at in range(len(sent.body)):
            writer.write(sent.body[at : at + 1])
            await asyncio.sleep(1 / sent.bytes_per_s)
    elif sent.pieces is not None:
        async for piece in sent.pieces():
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
            if got.status is None:
                got.sent += len(piece)
        if chunked:
            writer.write(b"0\r\n\r\n")
    else:
        writer.write(sent.body[: len(sent.body) // 2] if sent.half else sent.body)
    await writer.drain()
    if sent.half_close:
        writer.write_eof()


async def _read(
    reader: asyncio.StreamReader,
    sent: RawRequest,
    got: RawExchange,
    asked: asyncio.Event,
) -> None:
    if sent.leave == "before_first_byte":
        await asked.wait()
        await asyncio.sleep(0.05)
        got.left = True
        raise _Left
    if sent.read_per_s == 0:
        await asked.wait()
        await asyncio.sleep(2.0)
        got.left = True
        raise _Left
    parser = _ReplyParser(sent, got)
    size = 1 << 16 if sent.read_per_s is None else max(1, int(sent.read_per_s / 20))
    while not parser.is_done:
        data = await reader.read(size)
        if not data:
            return
        parser.feed(data)
        if sent.read_per_s is not None:
            await asyncio.sleep(len(data) / sent.read_per_s)


class _ReplyParser:
    """Reads a reply as its bytes come, and raises _Left at the place where the client leaves."""

    def __init__(self, sent: RawRequest, got: RawExchange) -> None:
        self._sent, self._got = sent, got
        self._data, self._line = b"", b""
        self._left_of_chunk = 0
        self.is_done = False

    def feed(self, data: bytes) -> None:
        self._data += data
        got = self._got
        if got.status is None:
            if b"\r\n\r\n" not in self._data:
                return
            head, self._data = self._data.split(b"\r\n\r\n", 1)
            first, *lines = head.decode("latin-1").split("\r\n")
            got.status = int(first.split()[1])
            pairs = (line.partition(":") for line in lines)
            got.headers = {k.strip().lower(): v.strip() for k, _, v in pairs}
            self._leave_if(self._sent.leave == {"at": "headers"})
        if got.headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunks()
        else:
            self._body(self._data)
            self._data = b""
            length = got.headers.get("content-length")
            self.is_done = length is not None and len(got.body) >= int(length)

    def _chunks(self) -> None:
        while self._data and not self.is_done:
            if self._left_of_chunk > 2:
                piece = self._data[: self._left_of_chunk - 2]
                self._data = self._data[len(piece) :]
                self._left_of_chunk -= len(piece)
                self._body(piece)
            elif self._left_of_chunk:
                gone = min(self._left_of_chunk, len(self._data))
                self._data, self._left_of_chunk = self._data[gone:], self._left_of_chunk - gone
            elif b"\r\n" in self._data:
                line, self._data = self._data.split(b"\r\n", 1)
                length = int(line.split(b";")[0], 16)
                self.is_done = length == 0
                self._left_of_chunk = length + 2
            else:
                return

    def _body(self, piece: bytes) -> None:
        got, leave = self._got, self._sent.leave
        got.body += piece
        if isinstance(leave, dict) and "bytes_of_body" in leave:
            self._leave_if(len(got.body) >= leave["bytes_of_body"])
        if not got.headers.get("content-type", "").startswith("text/event-stream"):
            return
        self._line += piece
        while b"\n\n" in self._line:
            block, self._line = self._line.split(b"\n\n", 1)
            text = block.decode()
            rows = [line.partition(":") for line in text.split("\n")]
            fields = {k: v.removeprefix(" ") for k, _, v in rows if k}
            if "data" not in fields:
                continue  # a comment
            got.raw_events.append(text)
            value = fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
            kind = fields.get("event", "")
            got.events.append((kind, value))
            if isinstance(value, dict):
                read_event(got, kind, value)
            self._leave_if(self._is_there(kind, leave))

    def _is_there(self, kind: str, leave: Any) -> bool:
        got = self._got
        if not isinstance(leave, dict):
            return False
        match leave:
            case {"at": "reasoning", "characters": count}:
                return len(got.thoughts.get(0, "")) >= count
            case {"characters": count}:
                return len(got.texts.get(leave.get("of_choice", 0), "")) >= count
            case {"events": count}:
                return len(got.events) >= count
            case {"at": "first_tool_call"}:
                return bool(got.calls)
            case {"at": "partial_tool_call"}:
                return got.partial_call
            case {"at": "last_text"}:
                return len(got.text) >= self._sent.last_text
            case {"at": name}:
                return bool(kind == name)
        return False

    def _leave_if(self, now: bool) -> None:
        if now:
            self._got.left = True
            raise _Left


def read_event(got: RawExchange, kind: str, value: dict[str, Any]) -> None:
    """Notes what an event of a stream tells."""
    if got.api in ("chat", "completions"):
        got.id = got.id or str(value.get("id") or "")
        for choice in value.get("choices") or []:
            delta = choice.get("delta") or {}
            _add(got.texts, choice.get("index", 0), delta.get("content") or choice.get("text"))
            _add(got.thoughts, choice.get("index", 0), delta.get("reasoning_content"))
            for call in delta.get("tool_calls") or []:
                got.partial_call = True
                _call_piece(got, call)
            got.finished |= choice.get("finish_reason") is not None
        return
    match kind or value.get("type"):
        case "response.created":
            got.id = value["response"]["id"]
        case "response.output_text.delta":
            _add(got.texts, 0, value["delta"])
        case "response.function_call_arguments.delta":
            got.partial_call = True
        case "response.output_item.done" if value["item"].get("type") == "function_call":
            item = value["item"]
            got.calls.append((item["name"], item["arguments"], item["call_id"]))
        case "response.completed" | "response.incomplete":
            got.finished = True
        case "message_start":
            got.id = value["message"]["id"]
        case "content_block_start" if value["content_block"].get("type") == "tool_use":
            block = value["content_block"]
            got.begun_block = [block["name"], "", block["id"]]
        case "content_block_delta":
            delta = value["delta"]
            _add(got.texts, 0, delta.get("text"))
            _add(got.thoughts, 0, delta.get("thinking"))
            if "partial_json" in delta:
                got.partial_call = got.partial_call or bool(delta["partial_json"])
                got.begun_block[1] += delta["partial_json"]
        case "content_block_stop" if got.begun_block:
            name, arguments, id_ = got.begun_block
            got.calls.append((name, arguments, id_))
            got.begun_block = []
        case "message_stop":
            got.finished = True


def _call_piece(got: RawExchange, call: dict[str, Any]) -> None:
    """Adds a piece of a call of Chat Completions; one is whole when its arguments are JSON."""
    function = call.get("function") or {}
    entry = got.pieces_of_calls.setdefault(call.get("index", 0), ["", "", ""])
    entry[0] += function.get("name") or ""
    entry[1] += function.get("arguments") or ""
    entry[2] = entry[2] or call.get("id") or ""
    with suppress(ValueError):
        json.loads(entry[1])
        got.calls.append((entry[0], entry[1], entry[2]))


def _add(texts: dict[int, str], index: int, text: str | None) -> None:
    if text:
        texts[index] = texts.get(index, "") + text


def _read_whole(got: RawExchange) -> None:
    """Notes what a body of JSON tells."""
    value = got.answer
    if not isinstance(value, dict) or got.status != 200:
        return
    got.id, got.finished = str(value.get("id") or ""), True
    for choice in value.get("choices") or []:
        message = choice.get("message") or {}
        _add(got.texts, choice.get("index", 0), message.get("content") or choice.get("text"))
        for call in message.get("tool_calls") or []:
            got.calls.append((call["function"]["name"], call["function"]["arguments"], call["id"]))
    for item in value.get("output") or []:
        for part in item.get("content") or [] if item.get("type") == "message" else []:
            _add(got.texts, 0, part.get("text"))
        if item.get("type") == "function_call":
            got.calls.append((item["name"], item["arguments"], item["call_id"]))
    for block in value.get("content") or [] if got.api == "messages" else []:
        _add(got.texts, 0, block.get("text"))
        if block.get("type") == "tool_use":
            got.calls.append((block["name"], json.dumps(block["input"]), block["id"]))
