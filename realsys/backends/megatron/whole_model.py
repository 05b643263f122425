"""The whole model in Hugging Face's form, put together from the parts of a slot's processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from realsys.api.model import ModuleSource
from realsys.backends.megatron.weights import Slice, Views
from realsys.models.shape import Weight
from realsys.param_realloc.boxes import Box


@torch.no_grad()
def gathered(
    views: Views,
    weights: Sequence[Weight],
    holdings: Sequence[Sequence[Slice]],
    group: Any,
    *,
    wanted: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights one after the other, on every process of the slot (collective).

    Args:
        holdings: what each process of ``group`` holds, by rank in it.
        wanted: False on processes that only give; they get empty tensors.
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
    """A Hugging Face module to be filled with whole weights, for generation."""
    module = source.empty().eval().requires_grad_(False)
    return _with_generation_settings(module, source)


def skeleton_of(source: ModuleSource) -> nn.Module:
    """The Hugging Face module without memory for weights: its config and its way of saving."""
    config = source.config()
    auto: Any = AutoModelForCausalLM
    if source.critic:
        auto, config.num_labels = AutoModelForTokenClassification, 1
    with torch.device("meta"):
        module: nn.Module = auto.from_config(config, dtype=getattr(torch, source.dtype))
    return _with_generation_settings(module, source)


def _with_generation_settings(module: Any, source: ModuleSource) -> nn.Module:
    """A module made from a config does not have the file beside it, where end tokens may stand."""
    path = Path(getattr(source, "path", ""))
    if not source.critic and (path / GENERATION_CONFIG_NAME).is_file():
        module.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return module  # type: ignore[no-any-return]
