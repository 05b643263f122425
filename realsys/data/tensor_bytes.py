"""Conversion between tensors and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Buffer = bytes | memoryview


def tensor_from_frames(
    dtype: torch.dtype, shape: tuple[int, ...], frames: Sequence[Buffer]
) -> torch.Tensor:
    """Makes a new tensor from the bytes of ``frames``, which must be exactly as many as it needs."""
    x = torch.empty(shape, dtype=dtype)
    if x.numel():
        target, start = bytes_of(x), 0
        for frame in frames:
            view = memoryview(frame)
            target[start : start + len(view)] = view
            start += len(view)
    return x


def bytes_of(x: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor with at least one element, without copying."""
    return memoryview(x.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
