"""Weights of a cut module, read from their source by each process for itself.

The module is cut while its weights have no memory (realsys/models/skeleton.py); then each process makes
memory for its part and reads just that. No process, no GPU and no host ever holds the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from realsys.api.model import Model, ModuleSource
from realsys.backends.lora import exchange_name
from realsys.backends.sharding import boxes, local_shard
from realsys.models.skeleton import make_memory
from realsys.models.source import module_of


@dataclass(frozen=True)
class Filling:
    """What a skeleton is to be filled with, once it is cut.

    Attributes:
        filled: False leaves the weights as they are: another copy fills them.
    """

    source: ModuleSource
    filled: bool

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device | str) -> None:
        """Makes memory on ``device`` for what this process has of each weight, and reads that.

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


def start_of(model: Model, dtype: str | None = None) -> tuple[nn.Module, Filling | None]:
    """The module to cut, and how to fill it afterwards; None: it has its weights already.

    Args:
        dtype: of the weights, if not the source's.
    """
    source: Any = model.module
    if isinstance(source, ModuleSource) and (module := source.skeleton(dtype)) is not None:
        return module, Filling(source, model.filled)
    return module_of(model), None
