"""Encodes typed Structs as msgpack and decodes them, checked against the type and a size limit.

For server.py and client.py. Bytes from a socket become a value of the expected type or a
ProtocolError; no other exception is raised, and received data never executes code. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from realsys.api.errors import RealsysError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# Deep nesting ends in RecursionError, an impossible length in MemoryError; a value that validates itself
# (SequenceMeta) raises a RealsysError.
_DECODE_ERRORS = (
    *(msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError),
    RealsysError,
)
_ENCODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)


class ProtocolError(RealsysError):
    """Raised for a message that can't be encoded or decoded: malformed, too large, of another
    version."""


def mismatch_error(what: str, *, where: str) -> ProtocolError:
    """Returns the error for a readable message that no peer of this version sends."""
    return ProtocolError(
        what,
        where=where,
        fix="both workers must run the same version of realsys; else report this as a bug",
    )


def encode(message: object, *, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Encodes a message. Raises ProtocolError if it is too large or not representable in msgpack."""
    try:
        data = msgspec.msgpack.encode(message)
    except _ENCODE_ERRORS as error:
        raise ProtocolError(
            f"{type(message).__name__} can't be encoded: {error}",
            where="sending",
            fix="messages hold numbers, text, bytes and Structs of these",
        ) from error
    if len(data) > max_bytes:
        raise ProtocolError(
            f"{type(message).__name__} has {len(data)} bytes, the limit is {max_bytes}",
            where="sending",
            fix="tensors and other bulk go over realsys.data.transfer, not in messages",
        )
    return data


def decode(data: bytes, type_: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Decodes ``data`` as ``type_``, a Struct or a union of tagged ones. Raises ProtocolError."""
    if len(data) > max_bytes:
        raise ProtocolError(
            f"received a message of {len(data)} bytes, the limit is {max_bytes}",
            where="receiving",
            fix="tensors and other bulk go over realsys.data.transfer, not in messages",
        )
    try:
        return _decoder(type_).decode(data)
    except _DECODE_ERRORS as error:
        raise ProtocolError(
            f"a message of {len(data)} bytes is not a {_type_name(type_)}: {error}",
            where="receiving",
            fix="both sides must run the same version of realsys; else report this as a bug",
        ) from error


@lru_cache(maxsize=64)
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_)


def _type_name(type_: Any) -> str:
    return getattr(type_, "__name__", str(type_))
