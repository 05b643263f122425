"""Gathers the whole model in Hugging Face's form from the parts of a slot's processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realsys.api.model import ModuleSource
from realsys.backends.megatron.megatron_weights import Slice, Views
from realsys.models.hf import hf_skeleton
from realsys.models.shape import Weight
from realsys.models.skeleton import skeleton
from realsys.weights.layouts.boxes import Box


@torch.no_grad()
def gather_weights(
    views: Views,
    weights: Sequence[Weight],
    holdings: Sequence[Sequence[Slice]],
    group: Any,
    *,
    wanted: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Gathers whole weights one after the other, on every process of the slot (collective).

    Args:
        holdings: what each process of ``group`` holds, by rank in it.
        wanted: False on processes that only send; they get empty tensors.
    """
    held_by = [_boxes(slices) for slices in holdings]
    device = next(iter(views.values()))[0][1].device
    dtype = next(iter(views.values()))[0][1].dtype
    rank = dist.get_rank(group)
    for weight in weights:
        whole = torch.empty(weight.shape if wanted else (0,), dtype=dtype, device=device)
        seen: set[Box] = set()
        for giver, boxes in enumerate(held_by):
            new = [box for box in boxes.get(weight.name, ()) if box not in seen]
            seen.update(new)
            if not new:
                continue
            if giver == rank:
                own = dict(views[weight.name])
                flat = torch.cat([own[box].reshape(-1) for box in new])
            else:
                flat = torch.empty(sum(box.numel for box in new), dtype=dtype, device=device)
            if len(holdings) > 1:
                dist.broadcast(flat, group=group, group_src=giver)
            if wanted:
                for box, part in zip(
                    new, torch.split(flat, [box.numel for box in new]), strict=True
                ):
                    whole[box.slices_in(Box.whole(weight.shape))] = part.view(box.shape)
        yield weight.name, whole


def _boxes(slices: Sequence[Slice]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for part in slices:
        found.setdefault(part.name, []).append(part.box)
    return found


def plain_module(source: ModuleSource) -> nn.Module:
    """Makes a Hugging Face module to be filled with whole weights, for generation."""
    module: nn.Module = source.empty()
    return module.eval().requires_grad_(False)


def skeleton_of(source: ModuleSource) -> nn.Module:
    """Makes the Hugging Face module without memory for weights, for its config and saving."""
    if (path := getattr(source, "path", None)) is not None:
        return hf_skeleton(path, critic=source.critic, dtype=source.dtype)
    module = source.load()
    made: nn.Module = skeleton(lambda: type(module)(copy.deepcopy(module.config)))
    return made
