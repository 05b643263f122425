"""Packed bodies of requests: what they unpack to, and how much of it is ever held."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib

import pytest

from realsys.transport.http_bodies import unpacked

TEXT = b'{"messages": []}' * 50
LONG = random.Random(0).randbytes(600_000) + bytes(600_000)
BARE = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (gzip.compress(TEXT), "gzip"),
        (gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:]), "gzip"),
        (zlib.compress(TEXT), "deflate"),
        (BARE.compress(TEXT) + BARE.flush(), "deflate"),
        (gzip.compress(LONG[:700_000], 1) + gzip.compress(LONG[700_000:], 1), "gzip"),
    ],
    ids=["gzip", "two of gzip", "zlib", "bare", "long"],
)
def test_a_packed_body_is_unpacked_up_to_its_limit(packed: bytes, encoding: str) -> None:
    text = LONG if len(packed) > len(TEXT) else TEXT
    assert unpacked(packed, encoding, len(text)) == text
    with pytest.raises(OverflowError):
        unpacked(packed, encoding, len(text) - 1)
    with pytest.raises(ValueError, match="early"):
        unpacked(packed[:-9], encoding, len(text))


@pytest.mark.parametrize("body", [b"{}", gzip.compress(b"") * 17, gzip.compress(b"x") + b"rest"])
def test_what_is_no_packed_body_is_refused(body: bytes) -> None:
    assert unpacked(b"", "gzip", 9) == b""
    with pytest.raises(ValueError):
        unpacked(body, "gzip", 100)


def test_no_more_than_the_limit_is_ever_held() -> None:
    bomb, most = gzip.compress(bytes(20 << 20)), 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(OverflowError):
            unpacked(bomb, "gzip", most)
        assert tracemalloc.get_traced_memory()[1] < 2 * most
    finally:
        tracemalloc.stop()
