"""Receives an encrypted stream on a thread that reads, verifies and decrypts the expected messages.

The owner (tensor_client.py) knows each message and its length from a reply over CURVE, so bytes from the
socket never determine memory sizes. No byte is used before its frame's tag was verified. Deadlines are
the owner's: ``close`` ends a thread that waits for a silent peer.
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
from realsys.transport.codec import mismatch_error

CONNECT_S = 10.0


class MessageSink(Protocol):
    """Destination of a message's bytes; used by the stream's thread."""

    def buffer(self, offset: int, num_bytes: int) -> memoryview | None:
        """Returns the buffer for these bytes of the message; None if they go to several places, see
        ``received``.
        """

    def received(self, offset: int, frame: memoryview) -> None:
        """Accepts verified bytes, in order.

        If ``buffer`` returned None, ``frame`` is reused after this call and must be copied.
        """


class TensorSink:
    """Writes a message into one tensor (contiguous, in host memory)."""

    def __init__(self, x: torch.Tensor) -> None:
        self._bytes = bytes_of(x)

    def buffer(self, offset: int, num_bytes: int) -> memoryview | None:
        return self._bytes[offset : offset + num_bytes]

    def received(self, offset: int, frame: memoryview) -> None:
        pass


class StreamResult(NamedTuple):
    """Result of an expected message: complete, connection lost (``cut``), or tampered with (``forged``)."""

    stream: bytes
    request_id: bytes = b""
    cut: str = ""
    forged: bool = False


class SealedReceiver:
    """Receives one stream.

    Args:
        arrived: called from the thread for each message, in order; after a message was cut or forged,
            also for each further expected message, with that failure.
    Raises:
        ClusterError: the address can't be reached.
    """

    def __init__(
        self,
        host: str,
        offer: StreamOffer,
        *,
        name: str,
        timeout_s: float,
        arrived: Callable[[StreamResult], None],
    ) -> None:
        self.stream = offer.stream
        self._arrived, self._next = arrived, 0
        self._wanted: SimpleQueue[tuple[bytes, SealedBytes, MessageSink] | None] = SimpleQueue()
        try:
            self._opener = FrameOpener(offer.key)
            self._socket = tcp.create_connection(
                (host, offer.port), timeout=max(0.001, min(timeout_s, CONNECT_S))
            )
        except (OSError, OverflowError, ValueError) as error:  # also for an invalid port or key
            raise ClusterError(
                f"{name} sends tensors from {host}:{offer.port}, which can't be reached: {error}",
                where=f"tcp://{host}:{offer.port}",
                fix="let the hosts of a job reach each other's port_range; realsys doctor tries it",
            ) from error
        self._socket.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_NODELAY, 1)
        self._socket.sendall(hello(offer))
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._main, name=f"sealed from {name}", daemon=True)
        self._thread.start()

    def expect(self, request_id: bytes, expected: SealedBytes, out: MessageSink) -> None:
        """Reads the next message into ``out`` and reports its completion under ``request_id``.

        Raises:
            ProtocolError: it is not the stream's next message.
        """
        if (expected.stream, expected.number) != (self.stream, self._next):
            raise mismatch_error(
                f"message {expected.number} of a stream was announced, {self._next} comes next",
                where="receiving tensors",
            )
        self._next += 1
        self._wanted.put((request_id, expected, out))

    def close(self) -> None:
        """Ends the thread, even if it is waiting for data."""
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
        failure: StreamResult | None = None
        while (item := self._wanted.get()) is not None:
            request_id, expected, out = item
            if failure is None:
                failure = self._read(expected, out)
            result = StreamResult(self.stream) if failure is None else failure
            self._arrived(result._replace(request_id=request_id))
            del item, out

    def _read(self, expected: SealedBytes, out: MessageSink) -> StreamResult | None:
        """Reads a message into ``out``; returns the failure, or None."""
        for offset in range(0, expected.num_bytes, FRAME_BYTES):
            length = min(FRAME_BYTES, expected.num_bytes - offset)
            sealed = self._sealed[: length + TAG_BYTES]
            try:
                if not self._receive(sealed):
                    return StreamResult(self.stream, cut="the peer closed the connection")
            except OSError as error:
                return StreamResult(self.stream, cut=str(error))
            buffer = out.buffer(offset, length)
            frame = self._plain[:length] if buffer is None else buffer
            place = place_of(expected.number, offset, expected.num_bytes)
            if not self._opener.open(sealed, place, frame):
                return StreamResult(self.stream, forged=True)
            out.received(offset, frame)
        return None

    def _receive(self, out: memoryview) -> bool:
        """Fills ``out``; returns False at the end of the connection."""
        while out:
            count = self._socket.recv_into(out, len(out), tcp.MSG_WAITALL)
            if not count:
                return False
            out = out[count:]
        return True
