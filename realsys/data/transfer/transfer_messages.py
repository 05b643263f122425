"""Messages between tensor servers and clients, and their conversion to tensors.

Headers are msgpack, checked against their type; tensors are raw bytes: in frames after the header if
they are few, in a slot of memory that both processes have mapped, or in an encrypted stream. No pickle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from realsys.api.data import SequenceMeta
from realsys.data.sequence_sample import SequenceSample
from realsys.data.tensor_bytes import Buffer, bytes_of, tensor_from_frames
from realsys.data.transfer.sealed_frames import StreamOffer
from realsys.transport.codec import ProtocolError, mismatch_error

FRAME_BYTES = 1 << 20  # fastest in a loopback measurement


class SharedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Location of rows in the server's shared memory: a file opened as ``/proc/<pid>/fd/<fd>``."""

    segment: int
    pid: int
    fd: int
    inode: int  # of the file, to detect another file under the same descriptor number
    size: int  # of the segment, bytes
    index: int  # index of its flag
    offset: int
    num_bytes: int


class SealedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Rows sent as message ``number`` (from 0) of a stream."""

    stream: bytes
    number: int
    num_bytes: int


class TensorRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests ``key`` of these datapoints.

    Attributes:
        host: the client's host identifier; a server with the same one may reply through shared memory.
            Empty requests frames.
        give_back: (segment, index) of slots that the client received but can't open.
        pid, start_ticks: of the client's process, so that its slots can be freed after its death.
        stream: the client's open stream from this server; empty if none.
    """

    trial: str
    attempt: int
    token: str
    key: str
    ids: tuple[str, ...]
    host: str = ""
    give_back: tuple[tuple[int, int], ...] = ()
    pid: int = 0
    start_ticks: int = 0
    stream: bytes = b""


class TensorPut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sends datapoints to be stored: their tensors follow in frames, key by key in the order of
    ``keys``.

    Attributes:
        frames: number of frames of each key.
    """

    trial: str
    attempt: int
    token: str
    meta: SequenceMeta
    keys: tuple[str, ...]
    frames: tuple[int, ...]


class TensorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Header of the frames that follow, or of rows in ``slot`` or ``sealed``; or an ``error``.

    Attributes:
        segments: the server's segments, so that the client can unmap others.
        offer: a stream instead of rows: the client opens it and requests them again.
    """

    dtype: str = ""
    trailing_shape: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    error: str = ""
    slot: SharedSlot | None = None
    segments: tuple[int, ...] = ()
    sealed: SealedBytes | None = None
    offer: StreamOffer | None = None


def header_of(rows: Sequence[torch.Tensor]) -> TensorReply:
    """Describes ``rows``. Raises ProtocolError if they are not rows of one tensor."""
    kinds = {(x.dtype, x.shape[1:]) for x in rows}
    if len(kinds) != 1:
        raise ProtocolError(
            f"rows of different kinds under one key: {sorted(map(str, kinds))[:3]}",
            where="tensor store",
            fix="give every datapoint the same dtype and trailing shape under a key",
        )
    return TensorReply(
        dtype=str(rows[0].dtype).removeprefix("torch."),
        trailing_shape=tuple(rows[0].shape[1:]),
        rows=tuple(len(x) for x in rows),
    )


def checked_layout(
    header: TensorReply, *, num_rows: int, num_bytes: int
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns dtype and shape of the tensor that ``header`` announces for ``num_bytes``.

    Raises:
        ProtocolError: header and size are inconsistent, or there are not ``num_rows`` datapoints.
    """
    dtype = getattr(torch, header.dtype, None)
    shape = (sum(header.rows), *header.trailing_shape)
    if (
        not isinstance(dtype, torch.dtype)
        or len(header.rows) != num_rows
        or min((*header.rows, *header.trailing_shape), default=0) < 0
        or math.prod(shape) * dtype.itemsize != num_bytes
    ):
        raise mismatch_error(
            f"{num_bytes} bytes of {len(header.rows)} datapoints came for {num_rows}, as "
            f"{header.dtype[:40]!r} of shape {shape[:8]}",
            where="receiving tensors",
        )
    return dtype, shape


def sample_of(put: TensorPut, frames: Sequence[Buffer]) -> SequenceSample:
    """Returns the datapoints sent with ``put``, in memory of their own.

    Raises:
        ProtocolError, DataError: frames and description are inconsistent.
    """
    meta = put.meta
    if (
        sorted(put.keys) != sorted(meta.keys)
        or len(put.frames) != len(put.keys)
        or min(put.frames, default=0) < 0
        or sum(put.frames) != len(frames)
    ):
        raise mismatch_error(
            f"{len(frames)} frames came for keys {list(put.keys)[:8]} of {put.frames[:8]}",
            where="receiving tensors",
        )
    data, start = {}, 0
    for key, num_frames in zip(put.keys, put.frames, strict=True):
        mine, start = frames[start : start + num_frames], start + num_frames
        header = TensorReply(
            dtype=meta.dtypes[key],
            trailing_shape=meta.trailing_shapes[key],
            rows=meta.rows_per_id(key),
        )
        num_bytes = sum(len(memoryview(frame)) for frame in mine)
        dtype, shape = checked_layout(header, num_rows=meta.batch_size, num_bytes=num_bytes)
        data[key] = tensor_from_frames(dtype, shape, mine)
    return SequenceSample.from_meta(meta, data)


def frames_of(x: torch.Tensor) -> list[memoryview]:
    """Splits the bytes of a contiguous CPU tensor into frames of ``FRAME_BYTES`` without copying."""
    if x.numel() == 0:
        return []
    buffer = bytes_of(x)
    return [buffer[i : i + FRAME_BYTES] for i in range(0, len(buffer), FRAME_BYTES)]
