"""The taking end of a sealed stream: a thread that reads, checks and decrypts what its owner waits for.

The owner (tensor_client.py) knows from an answer under CURVE what comes next and how long it is; nothing
that the socket says decides about memory. No byte is used before its frame's tag was checked. The
deadlines are the owner's too: ``close`` ends a thread that waits for a silent peer.
"""

from __future__ import annotations

import socket as tcp
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from realsys.api.errors import ClusterError
from realsys.data.tensor_bytes import bytes_of
from realsys.data.transfer.sealed_frames import (
    FRAME_BYTES,
    TAG_BYTES,
    FrameOpener,
    StreamOffer,
    hello,
    place_of,
)
from realsys.data.transfer.transfer_messages import SealedBytes
from realsys.transport.codec import ProtocolError

CONNECT_S = 10.0


class Landing(Protocol):
    """Where the bytes of a message go; used by the thread of its stream."""

    def room(self, offset: int, num_bytes: int) -> memoryview | None:
        """Where these bytes of the message are to be written; None: in several places, see ``landed``."""

    def landed(self, offset: int, frame: memoryview) -> None:
        """These bytes have come and are as they were sent; in order. ``frame`` is used again afterwards,
        where ``room`` gave none."""


class WholeLanding:
    """All bytes into one tensor (contiguous, in host memory)."""

    def __init__(self, x: torch.Tensor) -> None:
        self._bytes = bytes_of(x)

    def room(self, offset: int, num_bytes: int) -> memoryview | None:
        return self._bytes[offset : offset + num_bytes]

    def landed(self, offset: int, frame: memoryview) -> None:
        pass


class Arrived(NamedTuple):
    """A message is there, or the connection ended before (``cut``), or it is not as sent (``forged``)."""

    stream: bytes
    ticket: bytes = b""
    cut: str = ""
    forged: bool = False


class SealedReceiver:
    """One stream.

    Args:
        arrived: called from the thread for each message, in order; once it was cut or forged, for each
            message that was waited for and no more.
    Raises:
        ClusterError: nothing answers at the address.
    """

    def __init__(
        self,
        host: str,
        offer: StreamOffer,
        *,
        name: str,
        timeout_s: float,
        arrived: Callable[[Arrived], None],
    ) -> None:
        self.stream = offer.stream
        self._arrived, self._next = arrived, 0
        self._wanted: SimpleQueue[tuple[bytes, SealedBytes, Landing] | None] = SimpleQueue()
        try:
            self._opener = FrameOpener(offer.key)
            self._socket = tcp.create_connection(
                (host, offer.port), timeout=max(0.001, min(timeout_s, CONNECT_S))
            )
        except (OSError, OverflowError, ValueError) as error:  # also a port or key that can't be
            raise ClusterError(
                f"{name} gives tensors at {host}:{offer.port}, which can't be reached: {error}",
                where=f"tcp://{host}:{offer.port}",
                fix="let the hosts of a job reach each other's port_range; realsys doctor tries it",
            ) from error
        self._socket.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_NODELAY, 1)
        self._socket.sendall(hello(offer))
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._main, name=f"sealed from {name}", daemon=True)
        self._thread.start()

    def expect(self, ticket: bytes, coming: SealedBytes, out: Landing) -> None:
        """Reads the next message into ``out``, and says that it is there by ``ticket``.

        Raises:
            ProtocolError: it is not the next one.
        """
        if (coming.stream, coming.number) != (self.stream, self._next):
            raise ProtocolError(
                f"message {coming.number} of a stream was announced, {self._next} comes next",
                where="receiving tensors",
                fix="both workers must run the same version of realsys; else report this as a bug",
            )
        self._next += 1
        self._wanted.put((ticket, coming, out))

    def close(self) -> None:
        """Ends the thread, whatever it waits for."""
        self._wanted.put(None)
        with suppress(OSError):
            self._socket.shutdown(tcp.SHUT_RDWR)
        self._thread.join(5.0)

    def _main(self) -> None:
        try:
            self._serve()
        finally:
            self._socket.close()

    def _serve(self) -> None:
        self._sealed = memoryview(bytearray(FRAME_BYTES + TAG_BYTES))
        self._plain = memoryview(bytearray(FRAME_BYTES))
        failure: Arrived | None = None
        while (item := self._wanted.get()) is not None:
            ticket, coming, out = item
            if failure is None:
                failure = self._read(coming, out)
            said = Arrived(self.stream) if failure is None else failure
            self._arrived(said._replace(ticket=ticket))
            del item, out

    def _read(self, coming: SealedBytes, out: Landing) -> Arrived | None:
        """A message into ``out``; what went wrong, or None."""
        for offset in range(0, coming.num_bytes, FRAME_BYTES):
            length = min(FRAME_BYTES, coming.num_bytes - offset)
            sealed = self._sealed[: length + TAG_BYTES]
            try:
                if not self._receive(sealed):
                    return Arrived(self.stream, cut="the peer closed the connection")
            except OSError as error:
                return Arrived(self.stream, cut=str(error))
            room = out.room(offset, length)
            frame = self._plain[:length] if room is None else room
            place = place_of(coming.number, offset, coming.num_bytes)
            if not self._opener.open(sealed, place, frame):
                return Arrived(self.stream, forged=True)
            out.landed(offset, frame)
        return None

    def _receive(self, out: memoryview) -> bool:
        """Fills ``out``; False at the end of the connection."""
        while out:
            count = self._socket.recv_into(out, len(out), tcp.MSG_WAITALL)
            if not count:
                return False
            out = out[count:]
        return True
