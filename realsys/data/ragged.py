"""Conversion between packed rows ``[N, …]`` and a padded rectangle ``[B, T, …]``.

Batches are transferred packed; advantage estimation needs a rectangle. Both directions are one masked
copy, keep the dtype and are differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from realsys.api.errors import DataError

Side = Literal["left", "right"]  # side of the padding


def pad_packed(
    x: torch.Tensor, lengths: Sequence[int], *, value: float = 0, side: Side = "right"
) -> torch.Tensor:
    """Pads packed ``x [N, …]`` to ``[B, T, …]`` with T the longest length; padding is ``value``.

    Raises:
        DataError: the lengths don't add up to the rows of ``x``.
    """
    if sum(lengths) != x.shape[0]:
        raise DataError(
            f"x has {x.shape[0]} rows, lengths add up to {sum(lengths)}",
            where="pad_packed",
            fix="pass the piece lengths of the same key",
        )
    mask = length_mask(lengths, width=max(lengths, default=0), side=side, device=x.device)
    padded = x.new_full((*mask.shape, *x.shape[1:]), value)
    padded[mask] = x
    return padded


def unpad_to_packed(x: torch.Tensor, lengths: Sequence[int], side: Side = "right") -> torch.Tensor:
    """Packs ``x [B, T, …]`` to ``[N, …]``, the inverse of ``pad_packed``. T may exceed the longest
    length.

    Raises:
        DataError: ``x`` has another number of sequences, or is narrower than the longest.
    """
    num_sequences, width = x.shape[:2]
    if num_sequences != len(lengths) or width < max(lengths, default=0):
        raise DataError(
            f"x is {num_sequences} × {width}, lengths are {len(lengths)} sequences "
            f"of up to {max(lengths, default=0)}",
            where="unpad_to_packed",
            fix="pass the lengths that x was padded with",
        )
    return x[length_mask(lengths, width=width, side=side, device=x.device)]


def length_mask(
    lengths: Sequence[int],
    *,
    width: int,
    side: Side = "right",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Builds a bool mask ``[B, width]``, True on the tokens of each sequence and False on padding."""
    length_B1 = torch.tensor(list(lengths), dtype=torch.int64, device=device)[:, None]
    position_T = torch.arange(width, device=device)
    return position_T < length_B1 if side == "right" else position_T >= width - length_B1


def rows_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathers ``x[index]`` with the operation that is fast on the device and has a deterministic
    gradient.
    """
    # Rows used several times sum their gradients; on GPUs only this operation does so in a fixed order.
    return x[index] if x.is_cuda else x.index_select(0, index)
