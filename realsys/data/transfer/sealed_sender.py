"""The giving end of sealed streams: bulk tensors to clients of other hosts, over plain TCP sockets.

A client gets a stream's name, key and port in an answer under CURVE and opens it with a hello that proves
the key; then the stream carries the bytes of rows and nothing else. What they are is told under CURVE
(tensor_server.py). Each stream has a thread of its own, which encrypts straight from the rows.
"""

from __future__ import annotations

import asyncio
import logging
import socket as tcp
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
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

HELLO_S = 10.0  # as long as a CURVE handshake may take
STALLED_S = 60.0  # a client that has read nothing for so long is gone
MAX_OFFERS = 256  # that nobody has taken up yet


class SealedStream:
    """One stream: messages that wait, and once a client is there the thread that sends them."""

    def __init__(self, offer: StreamOffer, *, name: str, stalled_s: float) -> None:
        self.offer, self._stalled_s = offer, stalled_s
        self.is_over = False
        self._waiting: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        self._num_messages = 0
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.socket: tcp.socket | None = None

    def give(self, x: torch.Tensor) -> SealedBytes:
        """Sends ``x`` (uint8, contiguous, in host memory) in its turn; nobody may change it any more."""
        number, self._num_messages = self._num_messages, self._num_messages + 1
        self._waiting.put((number, x))
        return SealedBytes(stream=self.offer.stream, number=number, num_bytes=x.numel())

    def begin(self, socket: tcp.socket) -> None:
        """Sends over ``socket`` from now on."""
        self.socket = socket
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, also one that waits for its client; what waits is forgotten."""
        self.is_over = True
        self._waiting.put(None)
        if self.socket is not None:
            with suppress(OSError):  # the client has gone
                self.socket.shutdown(tcp.SHUT_RDWR)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Returns once the thread has ended; it was closed before."""
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
                del item, x, whole, frame  # or the rows stay until the next ones are there
        except OSError as error:
            if not self.is_over:
                logger.warning("tensor stream cut by=%s error=%s", self._thread.name, error)
                self.is_over = True
                with suppress(OSError):
                    self.socket.shutdown(tcp.SHUT_RDWR)  # the owner sees it, and closes us
                while self._waiting.get() is not None:
                    pass
        finally:
            self.socket.close()  # by nobody else: its number could be another file's by then

    def _send(self, data: memoryview) -> None:
        """Raises OSError when the client takes nothing for ``stalled_s``."""
        assert self.socket is not None
        self.socket.settimeout(self._stalled_s)
        while data:
            data = data[self.socket.send(data) :]


class SealedSender:
    """The streams of one tensor server; used by its event loop. The port is opened with the first offer.

    Args:
        host, ports: where clients connect; the server's own address and the site's range.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        ports: Iterable[int] | None,
        refusals: Refusals,
        hello_s: float = HELLO_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._name, self._host, self._ports, self._refusals = name, host, ports, refusals
        self._hello_s, self._stalled_s = hello_s, stalled_s
        self._listener: tcp.socket | None = None
        self._offered: dict[bytes, SealedStream] = {}  # oldest first
        self._open: dict[bytes, SealedStream] = {}
        self._left_behind: list[SealedStream] = []  # closed, their threads perhaps not yet over
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Streams that clients have opened and not left."""
        return len(self._open)

    def find(self, stream: bytes) -> SealedStream | None:
        """The stream of this name, offered or open, if bytes can still be given to it."""
        found = self._open.get(stream) or self._offered.get(stream)
        return None if found is None or found.is_over else found

    def offer(self) -> StreamOffer:
        """A new stream for the client that asks.

        Raises:
            ClusterError: no port is free.
        """
        if self._listener is None:
            self._listener = _listen(self._host, self._ports)
            self._start(self._accept(self._listener), "accept")
        while len(self._offered) >= MAX_OFFERS:
            self._offered.pop(next(iter(self._offered))).close()
        offer = new_offer(int(self._listener.getsockname()[1]))
        stream = SealedStream(offer, name=f"sealed {self._name}", stalled_s=self._stalled_s)
        self._offered[offer.stream] = stream
        asyncio.get_running_loop().call_later(self._hello_s, self._withdraw, offer.stream)
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
        for stream in [*streams, *self._left_behind]:
            stream.join()

    def _withdraw(self, name: bytes) -> None:
        """An offer that nobody took up in time."""
        if (stream := self._offered.pop(name, None)) is not None:
            stream.close()

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"sealed {what} {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: tcp.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                socket, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptors left: others may close theirs
                logger.warning("tensor stream not accepted name=%s error=%s", self._name, error)
                await asyncio.sleep(0.5)
                continue
            self._start(self._greet(socket, host), "hello")

    async def _greet(self, socket: tcp.socket, host: str) -> None:
        """Reads a hello; the socket becomes its stream's, or is closed."""
        socket.setblocking(False)
        said = b""
        try:
            async with asyncio.timeout(self._hello_s):
                while len(said) < HELLO_BYTES:
                    more = await asyncio.get_running_loop().sock_recv(
                        socket, HELLO_BYTES - len(said)
                    )
                    if not more:
                        break
                    said += more
        except (OSError, TimeoutError):
            pass
        except BaseException:
            socket.close()
            raise
        name = stream_of(said)
        stream = self._offered.get(name) if name is not None else None
        if stream is None or not is_hello(said, stream.offer):
            self._refusals.count("no_handshake" if name is None else "wrong_key", f"from {host}")
            socket.close()
            return
        self._open[stream.offer.stream] = self._offered.pop(stream.offer.stream)
        _keep_alive(socket)
        asyncio.get_running_loop().add_reader(socket.fileno(), self._left, stream, socket.fileno())
        stream.begin(socket)

    def _left(self, stream: SealedStream, fd: int) -> None:
        """A client says nothing after its hello: what can be read is the end of its stream."""
        asyncio.get_running_loop().remove_reader(fd)
        del self._open[stream.offer.stream]
        stream.close()
        self._left_behind = [s for s in self._left_behind if s.is_alive] + [stream]


def _listen(host: str, ports: Iterable[int] | None) -> tcp.socket:
    """A listening socket at the first free port. Raises ClusterError when there is none."""
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
    """A host that vanished is noticed in two minutes, also while nothing is sent to it."""
    socket.setsockopt(tcp.SOL_SOCKET, tcp.SO_KEEPALIVE, 1)
    socket.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_NODELAY, 1)
    for option, value in ((tcp.TCP_KEEPIDLE, 60), (tcp.TCP_KEEPINTVL, 10), (tcp.TCP_KEEPCNT, 6)):
        socket.setsockopt(tcp.IPPROTO_TCP, option, value)
