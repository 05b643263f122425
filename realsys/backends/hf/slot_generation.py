"""Generation shared by all processes of a data-parallel slot: each generates a share, all get all
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realsys.api.model import GenerationHyperparameters
from realsys.generation.engine.embedded_engine import GenerationResult, generate


def generate_in_slot(
    module: nn.Module,
    prompts: Sequence[Tensor],
    gconfig: GenerationHyperparameters,
    *,
    group: Any,
    row_seeds: Tensor,
    **settings: Any,
) -> GenerationResult:
    """Generates as ``generation.engine.generate``, by all processes of ``group`` together (collective).

    Rows are assigned in runs, so that answers to one prompt mostly stay together and share its prefill.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    bounds = [len(prompts) * i // size for i in range(size + 1)]
    own = slice(bounds[rank], bounds[rank + 1])
    result = generate(module, prompts[own], gconfig, row_seeds=row_seeds[own], **settings)
    if size == 1:
        return result
    device = next(module.parameters()).device
    lengths = torch.tensor([len(x) for x in result.tokens], dtype=torch.int64, device=device)
    all_lengths = torch.cat(_gather(lengths, group)).tolist()
    tokens = torch.cat(_gather(_joined(result.tokens, torch.int64, device), group))
    logprobs = torch.cat(_gather(_joined(result.logprobs, torch.float32, device), group))
    truncated = torch.cat(_gather(result.truncated.to(torch.uint8), group)).bool()
    kept = None if result.kept is None else _gather_kept(result.kept, all_lengths, group, device)
    return GenerationResult(
        list(torch.split(tokens, all_lengths)),
        list(torch.split(logprobs, all_lengths)),
        truncated,
        kept,
    )


def _gather_kept(
    own: Sequence[Sequence[bytes]], all_lengths: Sequence[int], group: Any, device: torch.device
) -> list[list[bytes]]:
    """Gathers the kept sets of all tokens from all processes."""
    sets = [kept for row in own for kept in row]
    sizes = torch.tensor([len(kept) for kept in sets], dtype=torch.int64, device=device)
    content = torch.frombuffer(bytearray(b"".join(sets)) or bytearray(1), dtype=torch.uint8)
    content = content[: int(sizes.sum())].to(device)
    all_sizes = torch.cat(_gather(sizes, group)).tolist()
    whole = torch.cat(_gather(content, group)).cpu().numpy().tobytes()
    ends = list(accumulate(all_sizes, initial=0))
    each = iter(whole[a:b] for a, b in pairwise(ends))
    return [list(islice(each, length)) for length in all_lengths]


def _joined(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *(x.to(dtype) for x in parts)])


def _gather(x: Tensor, group: Any) -> list[Tensor]:
    """Gathers one-dimensional tensors of possibly different lengths from all processes."""
    own = torch.tensor([len(x)], device=x.device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    longest = max(int(n) for n in sizes)
    padded = torch.cat([x, x.new_zeros(longest - len(x))])
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [y[: int(n)] for y, n in zip(found, sizes, strict=True)]
