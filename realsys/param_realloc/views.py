"""Pieces of weights in the memory of a process: found in its views, packed, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realsys.api.errors import InternalError
from realsys.param_realloc.boxes import Box
from realsys.param_realloc.buckets import Bucket, Piece

Views = Mapping[str, Sequence[tuple[Box, Tensor]]]  # as PipelinableEngine.held_weights gives them
_BLEND_NUMEL = 1 << 20


def parts_of(views: Views, piece: Piece) -> list[tuple[Box, Tensor]]:
    """The views' parts of a piece: (box, view of just that). They cover it.

    Raises:
        InternalError: they do not.
    """
    found = []
    for box, x in views.get(piece.name, ()):
        if (meet := box.meet(piece.box)) is not None:
            found.append((meet, x[meet.slices_in(box)]))
    if sum(meet.numel for meet, _ in found) != piece.box.numel:
        raise InternalError(
            f"the plan moves {piece.name} from {piece.box.start} to {piece.box.stop}, of which this "
            f"process holds {[(b.start, b.stop) for b, _ in views.get(piece.name, ())] or 'nothing'}",
            where="weight reallocation",
            fix="report this as a bug: the backend's layout and its engine's held_weights differ",
        )
    return found


def pack(views: Views, bucket: Bucket, dtypes: Mapping[str, str], buffer: Tensor) -> None:
    """Copies a bucket's pieces to their places in ``buffer`` (uint8 ``[bucket.num_bytes]``)."""
    for piece, packed in _packed(bucket, dtypes, buffer):
        for box, x in parts_of(views, piece):
            _check_is_lossless(piece, x.dtype, packed.dtype)
            packed[box.slices_in(piece.box)].copy_(x)


def unpack(
    views: Views, bucket: Bucket, dtypes: Mapping[str, str], buffer: Tensor, eta: float
) -> None:
    """Writes the pieces in ``buffer`` to the views."""
    for piece, packed in _packed(bucket, dtypes, buffer):
        for box, x in parts_of(views, piece):
            write(x, packed[box.slices_in(piece.box)], eta)


def copy_within(source: Views, target: Views, piece: Piece, eta: float) -> None:
    """Writes a piece of one copy of the model to another one in the same process."""
    taken = parts_of(source, piece)
    for box, x in parts_of(target, piece):
        for held, y in taken:
            if (meet := box.meet(held)) is not None:
                write(x[meet.slices_in(box)], y[meet.slices_in(held)], eta)


def write(target: Tensor, source: Tensor, eta: float) -> None:
    """target ← eta · source + (1 − eta) · target, in float32 (float64 for such weights).

    With ``eta`` = 1 a copy, in which only the target's dtype can round.
    """
    if eta == 1.0:
        target.copy_(source)
        return
    rows = len(target) if target.dim() else 1
    step = max(1, _BLEND_NUMEL * rows // target.numel())  # keeps what is made in float32 small
    for start in range(0, rows, step):
        block = slice(start, start + step) if target.dim() else ...
        x, y = target[block], source[block]
        exact = torch.promote_types(torch.float32, x.dtype)
        x.copy_(x.to(exact).mul_(1 - eta).add_(y.to(exact), alpha=eta))


def as_bytes(views: Views, bucket: Bucket, dtypes: Mapping[str, str]) -> Tensor | None:
    """The views' own memory as the bucket's message, where it is just that; else None."""
    if len(bucket.pieces) != 1:
        return None
    (piece,) = bucket.pieces
    parts = parts_of(views, piece)
    x = parts[0][1]
    if len(parts) > 1 or not x.is_contiguous() or x.dtype != _dtype(dtypes[piece.name]):
        return None
    return x.reshape(-1).view(torch.uint8)


def _packed(
    bucket: Bucket, dtypes: Mapping[str, str], buffer: Tensor
) -> list[tuple[Piece, Tensor]]:
    """Each piece and its place in the buffer, in its shape and dtype."""
    found = []
    for piece, begin in zip(bucket.pieces, bucket.offsets, strict=True):
        dtype = _dtype(dtypes[piece.name])
        end = begin + piece.box.numel * dtype.itemsize
        found.append((piece, buffer[begin:end].view(dtype).view(piece.box.shape)))
    return found


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _check_is_lossless(piece: Piece, held: torch.dtype, sent: torch.dtype) -> None:
    if torch.promote_types(held, sent) != sent:
        raise InternalError(
            f"{piece.name} is {held}, the plan sends {sent}",
            where="weight reallocation",
            fix="plan with the dtype of the source copy's weights",
        )
