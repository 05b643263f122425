"""Reads the bodies of requests, unpacked up to a limit: a small one may unpack to any size.

Of servers whose ``AppRunner`` has ``auto_decompress=False``: aiohttp unpacks within the event loop, and
goes on unpacking what was refused.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

from aiohttp import web

ENCODINGS = ("gzip", "deflate")  # of those that HTTP names; the others need packages
_PIECE = 1 << 18  # bytes that are unpacked, or made, at a time
_MOST_MEMBERS = 16  # streams behind each other in one body; clients write one


async def request_body(request: web.Request) -> bytes:
    """Reads a request's body, unpacked if it came packed, up to the ``client_max_size`` of its server.

    Raises:
        web.HTTPRequestEntityTooLarge: it has more bytes, or unpacks to more.
        web.HTTPUnsupportedMediaType: it is packed in another way.
        web.HTTPBadRequest: it can't be unpacked.
    """
    body = await request.read()
    encoding = request.headers.get("Content-Encoding", "").strip().lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return body
    most = request.client_max_size
    if encoding not in ENCODINGS:
        raise web.HTTPUnsupportedMediaType(
            text=f"a body with Content-Encoding {encoding[:40]!r} is not read: "
            f"send it as it is, or with {' or '.join(ENCODINGS)}"
        )
    try:
        return await asyncio.to_thread(unpacked, body, encoding, most)
    except OverflowError:
        raise web.HTTPRequestEntityTooLarge(
            max_size=most,
            actual_size=most + 1,
            text=f"the body unpacks by {encoding} to more than {most} bytes",
        ) from None
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the body is no {encoding}: {error}") from None


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Unpacks a body, once its size is known: what is too large is never held.

    Raises:
        OverflowError: it has more bytes than ``most``. ValueError: it can't be unpacked.
    """
    size = 0
    for part in _parts(body, encoding):
        size += len(part)
        if size > most:
            raise OverflowError
    return b"".join(_parts(body, encoding))


def _parts(body: bytes, encoding: str) -> Iterator[bytes]:
    bits = 16 + zlib.MAX_WBITS
    if encoding == "deflate" and body:  # as zlib has it, or bare
        bits = zlib.MAX_WBITS if body[0] & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS
    stream, members = zlib.decompressobj(bits), 1
    for at in range(0, len(body), _PIECE):
        left, is_full = body[at : at + _PIECE], False
        while left or is_full:
            if stream.eof:
                members += 1
                if members > _MOST_MEMBERS:
                    raise ValueError(f"more than {_MOST_MEMBERS} streams")
                stream = zlib.decompressobj(bits)
            try:
                part = stream.decompress(left, _PIECE)
            except zlib.error as error:
                raise ValueError(str(error)[:100]) from None
            yield part
            left = stream.unused_data or stream.unconsumed_tail
            is_full = (
                len(part) == _PIECE and not stream.eof
            )  # there may be more of what it has read
    if body and not stream.eof:
        raise ValueError("it ends too early")
