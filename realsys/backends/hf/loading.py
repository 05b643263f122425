"""Loads and saves the weights of a sharded module without the whole model in memory.

Loading: the module is sharded while its weights have no memory (realsys/models/skeleton.py); then each
process allocates its part and reads only that. Saving: weights are gathered one after the other, and each
is written before the next is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from realsys.api.model import Model, ModelBackend, ModuleSource
from realsys.backends.backend_arguments import InferenceArguments
from realsys.backends.hf.lora import exchange_name
from realsys.backends.hf.sharding import boxes, local_shard
from realsys.models.hf import StreamedWeights, can_stream, save_hf
from realsys.models.skeleton import make_memory
from realsys.models.source import module_of
from realsys.models.weight_writer import WeightSpec
from realsys.weights.layouts.holdings import held_dtype


class HFBackend(InferenceArguments, ModelBackend):
    """Base of the backends that hold a Hugging Face module; ``kind`` is their name."""

    kind: ClassVar[str]

    def held_dtype(
        self, dtype: str, *, trained: bool, averaged: bool = False, weight: str = ""
    ) -> str:
        return held_dtype(
            dtype,
            self.kind,
            trained=trained,
            averaged=averaged,
            adapters=self.adapters is not None,
            weight=weight,
        )


@dataclass(frozen=True)
class WeightFiller:
    """Fills a skeleton's weights after it was sharded.

    Attributes:
        filled: False leaves the weights uninitialised: another copy fills them.
    """

    source: ModuleSource
    filled: bool

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device | str) -> None:
        """Allocates this process's part of each weight on ``device`` and reads it.

        Weights that have memory already (adapters) keep their values.
        """
        named = dict(module.named_parameters())
        missing = [name for name, parameter in named.items() if parameter.is_meta]
        make_memory(module, device)
        if not self.filled:
            return
        parameters = dict(module.named_parameters())
        for name in missing:
            box = boxes(parameters[name])[-1]
            if box.numel:
                shard = local_shard(parameters[name])
                self.source.read_into(shard, exchange_name(name), box.start, box.stop)


def module_to_shard(
    model: Model, dtype: str | None = None
) -> tuple[nn.Module, WeightFiller | None]:
    """Returns the module to shard, and its later filling; None if it already has its weights.

    Args:
        dtype: dtype of the weights, if not the source's.
    """
    source: Any = model.module
    if isinstance(source, ModuleSource) and (module := source.skeleton(dtype)) is not None:
        return module, WeightFiller(source, model.filled)
    if isinstance(source, ModuleSource) and dtype is not None:
        source.dtype = dtype
    module = module_of(model)
    if dtype is not None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return module, None


def save_streamed(
    module: Any,
    tokenizer: Any,
    save_dir: str,
    *,
    kinds: Mapping[str, WeightSpec],
    weights: Iterable[tuple[str, Tensor]],
    writes: bool,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Iterates over ``weights``, which may be collective; the process that ``writes`` saves them.

    If transformers merges a family's weights before saving them, the writer gathers them all first.
    """
    if not writes:
        for _ in weights:
            pass
    elif can_stream(module, kinds):
        streamed = StreamedWeights(kinds, weights)
        save_hf(module, tokenizer, save_dir, also=also, weights=streamed)
    else:
        whole = {name: weight.to("cpu", kinds[name].dtype) for name, weight in weights}
        save_hf(module, tokenizer, save_dir, state_dict=whole, also=also)
