"""From tokens to their sequences and back: packed ``[N]`` with the lengths of sequences, or padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realsys.api.errors import DataError


def sum_per_sequence(x: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor:
    """``[B]`` from ``[B, T]``, or from packed ``[N]`` and the lengths of its sequences."""
    if lengths is None:
        if x.dim() != 2:
            raise DataError(
                f"a tensor of shape {tuple(x.shape)} doesn't say where its sequences end",
                where="sequence aggregation",
                fix="pass lengths=, or a padded [B, T] tensor",
            )
        return x.sum(1)
    if x.dim() != 1 or sum(lengths) != x.shape[0]:
        raise DataError(
            f"lengths add up to {sum(lengths)}, the tensor has shape {tuple(x.shape)}",
            where="sequence aggregation",
            fix="pass the lengths of the packed sequences",
        )
    return torch.stack([piece.sum() for piece in torch.split(x, list(lengths))])


def to_tokens(
    per_sequence_B: torch.Tensor, like: torch.Tensor, lengths: Sequence[int] | None
) -> torch.Tensor:
    """Each token's sequence's value, in the shape of ``like``."""
    if lengths is None:
        return per_sequence_B[:, None].expand_as(like)
    repeats = torch.tensor(list(lengths), dtype=torch.int64, device=like.device)
    return per_sequence_B.repeat_interleave(repeats)


def longest_runs(mask_N: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """int64 ``[B]``: of each packed sequence the longest run of True; 0 where there is none."""
    at_N = torch.arange(len(mask_N), device=mask_N.device)
    every_B = torch.arange(len(lengths), device=mask_N.device)
    place_N = to_tokens(every_B, mask_N, lengths)
    first_N = torch.cat([mask_N.new_ones(1), place_N[1:] != place_N[:-1]])[: len(mask_N)]
    # Of a token in a run: how many since the last one that is not, or since the sequence's first.
    outside_N = torch.where(mask_N, torch.where(first_N, at_N - 1, -1), at_N)
    run_N = (at_N - outside_N.cummax(0).values).masked_fill(~mask_N, 0)
    longest_B = run_N.new_zeros(len(lengths))
    return longest_B.scatter_reduce(0, place_N, run_N, "amax")
