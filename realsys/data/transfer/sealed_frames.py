"""Seals the bytes of a tensor stream with AES-256-GCM, and opens them again (no sockets, no torch).

A stream has a key of its own, used in one direction, once. Its nonces count: frame i of a stream opens as
frame i of that stream only, so a frame that is repeated, missing, swapped, cut or of another stream fails
as a changed one does. Each frame also names its message, its place in it and the message's length.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import msgspec

FRAME_BYTES = 1 << 20  # of a message, the last one less: ciphertext stays in the cache of its core
TAG_BYTES = 16
KEY_BYTES = 32
STREAM_BYTES = 16  # of a stream's name
HELLO_BYTES = 8 + STREAM_BYTES + TAG_BYTES
_MAGIC = b"realsys1"
_DATA, _HELLO = 0, 1  # first byte of a nonce: data and hello never share one


class StreamOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A stream to be opened by the client that asked, once: told under CURVE only.

    Attributes:
        port: TCP, at the address of the tensor server.
    """

    port: int
    stream: bytes
    key: bytes

    def __repr__(self) -> str:  # an offer in a log opens no stream
        return f"StreamOffer(port={self.port})"


def new_offer(port: int) -> StreamOffer:
    """With a new random name and key."""
    return StreamOffer(port=port, stream=os.urandom(STREAM_BYTES), key=os.urandom(KEY_BYTES))


def hello(offer: StreamOffer) -> bytes:
    """What a client says first: which stream, and that it has its key."""
    head = _MAGIC + offer.stream
    sealed: bytes = _cipher(offer.key).encrypt(_nonce(_HELLO, 0), b"", head)
    return head + sealed


def stream_of(said: bytes) -> bytes | None:
    """The stream that a hello names; None if it is no hello. ``is_hello`` says whether it may."""
    if len(said) != HELLO_BYTES or not said.startswith(_MAGIC):
        return None
    return said[len(_MAGIC) :][:STREAM_BYTES]


def is_hello(said: bytes, offer: StreamOffer) -> bool:
    """Whether ``said`` was made with the key of ``offer``."""
    from cryptography.exceptions import InvalidTag

    if stream_of(said) != offer.stream:
        return False
    head, tag = said[:-TAG_BYTES], said[-TAG_BYTES:]
    try:
        _cipher(offer.key).decrypt(_nonce(_HELLO, 0), tag, head)
    except InvalidTag:
        return False
    return True


class FrameSealer:
    """The sending end of one stream; used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = _cipher(key), 0

    def seal(self, frame: memoryview, place: bytes, out: memoryview) -> int:
        """Writes ``frame`` sealed to ``out``; returns its length there. ``place``: ``place_of``."""
        nonce = _nonce(_DATA, self._count)
        self._count += 1
        return int(self._cipher.encrypt_into(nonce, frame, place, out[: len(frame) + TAG_BYTES]))


class FrameOpener:
    """The receiving end of one stream; used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = _cipher(key), 0

    def open(self, sealed: memoryview, place: bytes, out: memoryview) -> bool:
        """Writes the frame to ``out``. False if it is not the next one of this stream, as it was sent:
        then ``out`` holds nothing that may be used, and neither does what comes later."""
        from cryptography.exceptions import InvalidTag

        nonce = _nonce(_DATA, self._count)
        self._count += 1
        try:
            self._cipher.decrypt_into(nonce, sealed, place, out)
        except InvalidTag:
            return False
        return True


def place_of(message: int, offset: int, num_bytes: int) -> bytes:
    """What is authenticated with a frame: its message, where it begins in it, the message's length."""
    return struct.pack(">QQQ", message, offset, num_bytes)


def _nonce(kind: int, count: int) -> bytes:
    return struct.pack(">BxxxQ", kind, count)


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # not of the control plane

    return AESGCM(key)
