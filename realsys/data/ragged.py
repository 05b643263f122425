"""Between packed rows ``[N, …]`` and a padded rectangle ``[B, T, …]``.

Batches travel packed; advantage estimation walks over a rectangle. Both directions are one masked
copy, keep the dtype and are differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from realsys.api.errors import DataError

Side = Literal["left", "right"]  # where the padding goes


def pad_packed(
    x: torch.Tensor, lengths: Sequence[int], *, value: float = 0, side: Side = "right"
) -> torch.Tensor:
    """``[B, T, …]`` with T the longest length, from packed ``x [N, …]``; padding is ``value``.

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
    """Packed ``[N, …]`` from ``x [B, T, …]``, the inverse of ``pad_packed``. T may be wider.

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
    """bool ``[B, width]``, True on the tokens of each sequence and False on its padding."""
    length_B1 = torch.tensor(list(lengths), dtype=torch.int64, device=device)[:, None]
    position_T = torch.arange(width, device=device)
    return position_T < length_B1 if side == "right" else position_T >= width - length_B1


def rows_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[index]``, by what is fast on the device and has a gradient that is the same each time."""
    # Rows that stand in several places add up their gradients: on GPUs only so in one order.
    return x[index] if x.is_cuda else x.index_select(0, index)
