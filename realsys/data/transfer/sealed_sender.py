"""Sends bulk tensors to clients on other hosts over encrypted TCP streams.

A client gets a stream's name, key and port in a reply over CURVE and opens it with a hello that proves
the key; then the stream carries row bytes and nothing else. Their description is sent over CURVE
(tensor_server.py). Each stream has its own thread, which encrypts directly from the rows.
"""

from __future__ import annotations

import asyncio
import logging
import socket as tcp
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from realsys.api.errors import ClusterError
from realsys.data.tensor_bytes import bytes_of
from realsys.data.transfer.sealed_frames import (
    FRAME_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    FrameSealer,
    StreamOffer,
    is_hello,
    new_offer,
    place_of,
    stream_of,
)
from realsys.data.transfer.transfer_messages import SealedBytes
from realsys.transport.authentication import Refusals
from realsys.transport.binding import address_of

logger = logging.getLogger(__name__)

HELLO_S = 10.0  # same limit as for a CURVE handshake
STALLED_S = 60.0  # a client that reads nothing for this long counts as disconnected
MAX_OFFERS = 256  # limit on offers not used yet


class SealedStream:
    """One stream: queued messages, and after the client connected the thread that sends them."""

    def __init__(self, offer: StreamOffer, *, name: str, stalled_s: float) -> None:
        self.offer, self._stalled_s = offer, stalled_s
        self.is_over = False
        self._waiting: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        self._num_messages = 0
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.socket: tcp.socket | None = None

    def enqueue(self, x: torch.Tensor) -> SealedBytes:
        """Queues ``x`` (uint8, contiguous, in host memory), which must not be changed any more."""
        number, self._num_messages = self._num_messages, self._num_messages + 1
        self._waiting.put((number, x))
        return SealedBytes(stream=self.offer.stream, number=number, num_bytes=x.numel())

    def start(self, socket: tcp.socket) -> None:
        """Starts sending over ``socket``."""
        self.socket = socket
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, even if it is waiting for its client; queued messages are dropped."""
        self.is_over = True
        self._waiting.put(None)
        if self.socket is not None:
            with suppress(OSError):  # the client has disconnected
                self.socket.shutdown(tcp.SHUT_RDWR)

    @property
    def is_alive(self) -> bool:
        """True while the stream's thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits until the thread of a closed stream has ended."""
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _main(self) -> None:
        assert self.socket is not None
        sealer = FrameSealer(self.offer.key)
        out = memoryview(bytearray(FRAME_BYTES + TAG_BYTES))
        try:
            while (item := self._waiting.get()) is not None and not self.is_over:
                number, x = item
                whole = bytes_of(x)
                for offset in range(0, len(whole), FRAME_BYTES):
                    frame = whole[offset : offset + FRAME_BYTES]
                    length = sealer.seal(frame, place_of(number, offset, len(whole)), out)
                    self._send(out[:length])
                # Otherwise these rows stay allocated until the next ones arrive
                del item, x, whole, frame
        except OSError as error:
            if not self.is_over:
                logger.warning("tensor stream cut by=%s error=%s", self._thread.name, error)
                self.is_over = True
                with suppress(OSError):
                    self.socket.shutdown(tcp.SHUT_RDWR)  # the owner notices and closes this stream
                while self._waiting.get() is not None:
                    pass
        finally:
            self.socket.close()  # closed only here: elsewhere its number could already be another file's

    def _send(self, data: memoryview) -> None:
        """Sends ``data``. Raises OSError if the client reads nothing for ``stalled_s``."""
        assert self.socket is not None
        self.socket.settimeout(self._stalled_s)
        while data:
            data = data[self.socket.send(data) :]


@dataclass(eq=False, repr=False, kw_only=True)
class SealedSender:
    """All streams of one tensor server; used by its event loop. The first offer opens the port.

    Args:
        host, ports: address that clients connect to: the server's host and the site's port range.
    """

    name: str
    host: str
    ports: Iterable[int] | None
    refusals: Refusals
    hello_s: float = HELLO_S
    stalled_s: float = STALLED_S

    def __post_init__(self) -> None:
        self._listener: tcp.socket | None = None
        self._offered: dict[bytes, SealedStream] = {}  # oldest first
        self._open: dict[bytes, SealedStream] = {}
        self._closed: list[SealedStream] = []  # closed streams whose threads may still be ending
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Number of streams that clients have open."""
        return len(self._open)

    def find(self, stream: bytes) -> SealedStream | None:
        """Returns the offered or open stream of this name, or None if it can't accept messages."""
        found = self._open.get(stream) or self._offered.get(stream)
        return None if found is None or found.is_over else found

    def offer(self) -> StreamOffer:
        """Offers a new stream to the requesting client.

        Raises:
            ClusterError: no port is free.
        """
        if self._listener is None:
            self._listener = _listen(self.host, self.ports)
            self._start(self._accept(self._listener), "accept")
        while len(self._offered) >= MAX_OFFERS:
            self._offered.pop(next(iter(self._offered))).close()
        offer = new_offer(int(self._listener.getsockname()[1]))
        stream = SealedStream(offer, name=f"sealed {self.name}", stalled_s=self.stalled_s)
        self._offered[offer.stream] = stream
        asyncio.get_running_loop().call_later(self.hello_s, self._withdraw, offer.stream)
        return offer

    def close(self) -> None:
        """Ends all streams and their threads."""
        for task in self._tasks:
            task.cancel()
        for stream in self._open.values():
            if stream.socket is not None:
                asyncio.get_running_loop().remove_reader(stream.socket.fileno())
        if self._listener is not None:
            self._listener.close()
        streams = [*self._open.values(), *self._offered.values()]
        for stream in streams:
            stream.close()
        for stream in [*streams, *self._closed]:
            stream.join()

    def _withdraw(self, name: bytes) -> None:
        """Withdraws an offer that was not used in time."""
        if (stream := self._offered.pop(name, None)) is not None:
            stream.close()

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"sealed {what} {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: tcp.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                socket, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptors left; wait until some are closed
                logger.warning("tensor stream not accepted name=%s error=%s", self.name, error)
                await asyncio.sleep(0.5)
                continue
            self._start(self._handshake(socket, host), "hello")

    async def _handshake(self, socket: tcp.socket, host: str) -> None:
        """Reads a hello; hands the socket to its stream, or closes it."""
        socket.setblocking(False)
        received = b""
        try:
            async with asyncio.timeout(self.hello_s):
                while len(received) < HELLO_BYTES:
                    more = await asyncio.get_running_loop().sock_recv(
                        socket, HELLO_BYTES - len(received)
                    )
                    if not more:
                        break
                    received += more
        except (OSError, TimeoutError):
            pass
        except BaseException:
            socket.close()
            raise
        name = stream_of(received)
        stream = self._offered.get(name) if name is not None else None
        if stream is None or not is_hello(received, stream.offer):
            self.refusals.count("no_handshake" if name is None else "wrong_key", f"from {host}")
            socket.close()
            return
        self._open[stream.offer.stream] = self._offered.pop(stream.offer.stream)
        _keep_alive(socket)
        asyncio.get_running_loop().add_reader(
            socket.fileno(), self._on_client_left, stream, socket.fileno()
        )
        stream.start(socket)

    def _on_client_left(self, stream: SealedStream, fd: int) -> None:
        """Closes a stream whose client disconnected: clients send nothing after their hello."""
        asyncio.get_running_loop().remove_reader(fd)
        del self._open[stream.offer.stream]
        stream.close()
        self._closed = [s for s in self._closed if s.is_alive] + [stream]


def _listen(host: str, ports: Iterable[int] | None) -> tcp.socket:
    """Opens a listening socket at the first free port. Raises ClusterError if there is none."""
    family, address = address_of(host)
    for port in (0,) if ports is None else ports:
        with suppress(OSError):
            socket = tcp.create_server((address, port), family=family, backlog=128)
            socket.setblocking(False)
            return socket
    raise ClusterError(
        "no port is free for tensors to other hosts",
        where=f"{address}, port_range of the cluster spec",
        fix="widen port_range: every model worker needs three ports of its node",
    )


def _keep_alive(socket: tcp.socket) -> None:
    """Sets keep-alive options: a vanished host is detected in two minutes even if nothing is sent."""
    socket.setsockopt(tcp.SOL_SOCKET, tcp.SO_KEEPALIVE, 1)
    socket.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_NODELAY, 1)
    for option, value in ((tcp.TCP_KEEPIDLE, 60), (tcp.TCP_KEEPINTVL, 10), (tcp.TCP_KEEPCNT, 6)):
        socket.setsockopt(tcp.IPPROTO_TCP, option, value)
