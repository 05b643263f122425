"""Finds pieces of weights in a process's memory, packs them into messages and writes them back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from realsys.api.errors import InternalError
from realsys.weights.layouts.boxes import Box
from realsys.weights.realloc.buckets import Bucket, WeightPiece

Views = Mapping[str, Sequence[tuple[Box, Tensor]]]  # as PipelinableEngine.held_weights gives them
_BLEND_NUMEL = 1 << 20


def parts_of(views: Views, piece: WeightPiece) -> list[tuple[Box, Tensor]]:
    """Returns the views' parts of a piece: (box, view of exactly that). They cover the piece.

    Raises:
        InternalError: they do not cover it.
    """
    found = []
    for box, x in views.get(piece.name, ()):
        if (intersection := box.intersection(piece.box)) is not None:
            found.append((intersection, x[intersection.slices_in(box)]))
    if sum(intersection.numel for intersection, _ in found) != piece.box.numel:
        raise InternalError(
            f"the plan moves {piece.name} from {piece.box.start} to {piece.box.stop}, of which this "
            f"process holds {[(b.start, b.stop) for b, _ in views.get(piece.name, ())] or 'nothing'}",
            where="weight reallocation",
            fix="report this as a bug: the backend's layout and its engine's held_weights differ",
        )
    return found


def addresses_of(views: Views) -> Hashable:
    """Addresses and strides of the views; equal for views of the same memory."""
    return tuple(
        (name, box, x.data_ptr(), x.stride(), x.dtype)
        for name, parts in views.items()
        for box, x in parts
    )


class Move(NamedTuple):
    """A part of a weight and its place in a message.

    ``flat``: the part's bytes, if the message holds the same bytes in one run. Otherwise ``part`` selects
    from a piece of ``shape`` and ``dtype`` at bytes ``begin`` … ``end`` of the message.
    """

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    x: Tensor
    flat: np.ndarray[Any, Any] | None

    def place(self, message: Tensor) -> Tensor:
        """Returns the part's place in the message, as a typed view."""
        return message[self.begin : self.end].view(self.dtype).view(self.shape)[self.part]


def moves_of(views: Views, bucket: Bucket, dtypes: Mapping[str, str]) -> list[Move]:
    """Maps a bucket's message to the views."""
    found = []
    for piece, begin in zip(bucket.pieces, bucket.offsets, strict=True):
        dtype: torch.dtype = getattr(torch, dtypes[piece.name])
        whole = piece.box
        for box, x in parts_of(views, piece):
            if box.shape[1:] == whole.shape[1:]:  # whole rows: one run of the message
                row_bytes = x.numel() // max(1, len(box.shape) and box.shape[0]) * dtype.itemsize
                first = begin + (box.start[0] - whole.start[0] if box.start else 0) * row_bytes
                end = first + x.numel() * dtype.itemsize
                flat = _flat_bytes(x) if _is_plain(x) and x.dtype == dtype else None
                bare = None if flat is None else flat.numpy()
                found.append(Move(first, end, dtype, box.shape, (), x, bare))
            else:
                end = begin + whole.numel * dtype.itemsize
                index = box.slices_in(whole)
                found.append(Move(begin, end, dtype, whole.shape, index, x, None))
    return found


def check_lossless(
    views: Views,
    names: Iterable[str],
    dtypes: Mapping[str, str],
    rounded: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises InternalError if sending weights in these dtypes would round.

    Args:
        rounded: weight → held dtype, for weights that are rounded on purpose.
    """
    for name in names:
        sent: torch.dtype = getattr(torch, dtypes[name])
        for held in {x.dtype for _, x in views.get(name, ())}:
            meant = str(held) == f"torch.{rounded.get(name)}"
            if not meant and torch.promote_types(held, sent) != sent:
                raise InternalError(
                    f"{name} is {held}, the plan sends {sent}",
                    where="weight reallocation",
                    fix="plan with the dtype of the source copy's weights",
                )


def pack(moves: Iterable[Move], message: Tensor) -> None:
    """Copies the parts to their places in ``message`` (uint8)."""
    plain = message.numpy() if message.device.type == "cpu" else None
    for move in moves:
        if plain is not None and move.flat is not None:
            np.copyto(plain[move.begin : move.end], move.flat)
        else:
            move.place(message).copy_(move.x)


def unpack(moves: Iterable[Move], message: Tensor, eta: float) -> None:
    """Writes the content of ``message`` to the parts."""
    plain = message.numpy() if message.device.type == "cpu" and eta == 1.0 else None
    for move in moves:
        if plain is not None and move.flat is not None:
            np.copyto(move.flat, plain[move.begin : move.end])
        else:
            write(move.x, move.place(message), eta)


def message_in_place(moves: list[Move], num_bytes: int) -> Tensor | None:
    """Returns the view's own memory if it equals the whole message; else None."""
    if len(moves) != 1:
        return None
    (move,) = moves
    fits = not move.part and move.end - move.begin == num_bytes
    if not fits or move.x.dtype != move.dtype or not move.x.is_contiguous():
        return None
    return _flat_bytes(move.x)


def copy_within(source: Views, target: Views, piece: WeightPiece, eta: float) -> None:
    """Copies a piece from one copy of the model to another in the same process."""
    taken = parts_of(source, piece)
    for box, x in parts_of(target, piece):
        for held, y in taken:
            if (intersection := box.intersection(held)) is not None:
                write(x[intersection.slices_in(box)], y[intersection.slices_in(held)], eta)


def write(target: Tensor, source: Tensor, eta: float) -> None:
    """Sets target ← eta · source + (1 − eta) · target, in float32 (float64 for such weights).

    With ``eta`` = 1 it is a copy, in which only the target's dtype can round.
    """
    if eta == 1.0:
        copy(target, source)
        return
    rows = len(target) if target.dim() else 1
    step = max(1, _BLEND_NUMEL * rows // target.numel())  # bounds the float32 temporaries
    for start in range(0, rows, step):
        block = slice(start, start + step) if target.dim() else ...
        x, y = target[block], source[block]
        exact = torch.promote_types(torch.float32, x.dtype)
        x.copy_(x.to(exact).mul_(1 - eta).add_(y.to(exact), alpha=eta))


def copy(target: Tensor, source: Tensor) -> None:
    """Copies source to target. Contiguous memory uses memcpy, which is faster than torch's loop."""
    if source.dtype == target.dtype and _is_plain(source) and _is_plain(target):
        np.copyto(_flat_bytes(target).numpy(), _flat_bytes(source).numpy())
    else:
        target.copy_(source)


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous()


def _flat_bytes(x: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)
