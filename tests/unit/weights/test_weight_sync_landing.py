"""Buckets of weights that are written to their places as they come: all bytes, once, and checked."""

import golden
import msgspec
import numpy as np
import pytest
import torch
from test_weight_sync_parts import WEIGHTS, lists
from xxhash import xxh3_64, xxh3_64_intdigest

from realsys.transport.codec import ProtocolError
from realsys.weights.sync.assembly import Assembly
from realsys.weights.sync.buffer_pool import BufferPool


@pytest.mark.parametrize("size", [0, 5, 4096, 3 << 20, (3 << 20) + 4096 + 9])
def test_a_checksum_of_pieces_is_that_of_the_whole(size):
    x = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    running = xxh3_64()
    for start in range(0, size, 1 << 20):
        running.update(x[start : start + (1 << 20)])
    assert running.intdigest() == xxh3_64_intdigest(x)
    if size:
        x[size // 2] ^= 1
        assert running.intdigest() != xxh3_64_intdigest(x)


@pytest.mark.parametrize("frame_bytes", [7, 16, 1000])
def test_a_bucket_lands_in_its_places_in_whatever_pieces_it_comes(frame_bytes, monkeypatch):
    """Frames within a weight, over the border of two, over all."""
    monkeypatch.setattr("realsys.weights.sync.assembly.xxh3_64", SumOfBytes)
    whole = {w.name: torch.randn(w.shape) for w in WEIGHTS}
    for part in lists(bucket_bytes=1 << 20):
        assembly = Assembly(part.weights, {}, BufferPool())
        for bucket in part.buckets:
            data = b"".join(
                whole[piece.name][tuple(map(slice, piece.box.start, piece.box.stop))]
                .contiguous()
                .numpy()
                .tobytes()
                for piece in part.bucket(bucket).pieces
            )
            assert len(data) == bucket.num_bytes
            sink = assembly.sink(part, bucket)
            for start in range(0, len(data), frame_bytes):
                frame = memoryview(data)[start : start + frame_bytes]
                if (buffer := sink.buffer(start, len(frame))) is not None:
                    buffer[:] = frame
                sink.received(start, frame)
            for piece in part.bucket(bucket).pieces:
                place = tuple(map(slice, piece.box.start, piece.box.stop))
                assert torch.equal(assembly.weights[piece.name][place], whole[piece.name][place])
            with golden.raises(ProtocolError):
                sink.check()  # that of the list is of other bytes
            assert sink._checksum.total == sum(data)


class SumOfBytes:
    """Instead of a checksum: shows which bytes it was given."""

    total = 0

    def update(self, frame):
        self.total += sum(frame)

    def intdigest(self):
        return -1


def test_a_bucket_of_columns_or_of_kept_weights_does_not_land():
    (part, *_) = lists(bucket_bytes=1 << 20)
    (bucket,) = part.buckets
    piece = bucket.pieces[0]
    columns = msgspec.structs.replace(piece, stop=(piece.stop[0], piece.stop[1] - 1))
    assembly = Assembly(part.weights, {}, BufferPool())
    assert assembly.sink(part, bucket) is not None
    assert assembly.sink(part, msgspec.structs.replace(bucket, pieces=(columns,))) is None
    kept = Assembly(part.weights, {"a": assembly.weights["a"]}, BufferPool())
    assert kept.sink(part, bucket) is None
