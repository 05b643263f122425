"""Encrypts the frames of a tensor stream with AES-256-GCM and decrypts them (no sockets, no torch).

Each stream has its own key, used in one direction, once. Nonces are counters: frame i of a stream
decrypts only as frame i of that stream, so a repeated, missing, swapped, truncated or foreign frame fails
authentication as a modified one does. Each frame also authenticates its message, its offset in it and the
message's length.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import msgspec

# The last frame of a message is shorter; small enough that ciphertext stays in the core's cache
FRAME_BYTES = 1 << 20
TAG_BYTES = 16
KEY_BYTES = 32
STREAM_BYTES = 16  # length of a stream's name
HELLO_BYTES = 8 + STREAM_BYTES + TAG_BYTES
_MAGIC = b"realsys1"
_DATA, _HELLO = 0, 1  # first byte of a nonce, so that data and hello never share one


class StreamOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that the requesting client may open once; sent only over CURVE connections.

    Attributes:
        port: TCP port at the address of the tensor server.
    """

    port: int
    stream: bytes
    key: bytes

    def __repr__(self) -> str:  # keeps keys out of logs
        return f"StreamOffer(port={self.port})"


def new_offer(port: int) -> StreamOffer:
    """Makes an offer with a new random name and key."""
    return StreamOffer(port=port, stream=os.urandom(STREAM_BYTES), key=os.urandom(KEY_BYTES))


def hello(offer: StreamOffer) -> bytes:
    """Builds a client's first message: the stream's name, and proof that it has the key."""
    head = _MAGIC + offer.stream
    sealed: bytes = _cipher(offer.key).encrypt(_nonce(_HELLO, 0), b"", head)
    return head + sealed


def stream_of(message: bytes) -> bytes | None:
    """Returns the stream that a hello names, None if it is no hello. ``is_hello`` verifies the key."""
    if len(message) != HELLO_BYTES or not message.startswith(_MAGIC):
        return None
    return message[len(_MAGIC) :][:STREAM_BYTES]


def is_hello(message: bytes, offer: StreamOffer) -> bool:
    """True if ``message`` was made with the key of ``offer``."""
    from cryptography.exceptions import InvalidTag

    if stream_of(message) != offer.stream:
        return False
    head, tag = message[:-TAG_BYTES], message[-TAG_BYTES:]
    try:
        _cipher(offer.key).decrypt(_nonce(_HELLO, 0), tag, head)
    except InvalidTag:
        return False
    return True


class FrameSealer:
    """Encrypts the frames of one stream; used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = _cipher(key), 0

    def seal(self, frame: memoryview, place: bytes, out: memoryview) -> int:
        """Writes ``frame`` encrypted to ``out``; returns its encrypted length. ``place`` is from
        ``place_of``.
        """
        nonce = _nonce(_DATA, self._count)
        self._count += 1
        return int(self._cipher.encrypt_into(nonce, frame, place, out[: len(frame) + TAG_BYTES]))


class FrameOpener:
    """Decrypts the frames of one stream; used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = _cipher(key), 0

    def open(self, sealed: memoryview, place: bytes, out: memoryview) -> bool:
        """Decrypts the stream's next frame into ``out``; False if it fails authentication.

        After a failure neither ``out`` nor later frames of the stream may be used.
        """
        from cryptography.exceptions import InvalidTag

        nonce = _nonce(_DATA, self._count)
        self._count += 1
        try:
            self._cipher.decrypt_into(nonce, sealed, place, out)
        except InvalidTag:
            return False
        return True


def place_of(message: int, offset: int, num_bytes: int) -> bytes:
    """Authenticated data of a frame: its message, its offset in it, the message's length."""
    return struct.pack(">QQQ", message, offset, num_bytes)


def _nonce(kind: int, count: int) -> bytes:
    return struct.pack(">BxxxQ", kind, count)


def _cipher(key: bytes) -> Any:
    # Imported late: not needed by the control plane
    from cryptography.hazmat.primitives.ciphers.aead import (
        AESGCM,
    )

    return AESGCM(key)
