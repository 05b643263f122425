"""Tensors as bytes and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Buffer = bytes | memoryview


def joined(dtype: torch.dtype, shape: tuple[int, ...], frames: Sequence[Buffer]) -> torch.Tensor:
    """A new tensor from the bytes of ``frames``, which are as many as it needs."""
    x = torch.empty(shape, dtype=dtype)
    if x.numel():
        target, start = bytes_of(x), 0
        for frame in frames:
            view = memoryview(frame)
            target[start : start + len(view)] = view
            start += len(view)
    return x


def bytes_of(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor with at least one element; not copied."""
    return memoryview(x.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
