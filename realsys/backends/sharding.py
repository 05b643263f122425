"""Weights in shards: made, gathered, copied out and put back. Mechanics only; fsdp.py decides.

Without shards every function here does the plain thing, so callers need not ask.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards each transformer layer by itself, then the rest, in place."""
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    for part in module.modules():
        if type(part).__name__ in kinds:
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def plain_copy(cls: Any, module: Any, device: torch.device) -> nn.Module:
    """An unsharded module of the same shape; its weights are to be filled in."""
    with torch.random.fork_rng(devices=[]):  # its random weights must not move anyone's seed
        plain: nn.Module = cls(copy.deepcopy(module.config))
    dtype = next(module.parameters()).dtype
    for parameter in plain.parameters():  # not plain.to(dtype): rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    return plain.to(device).eval().requires_grad_(False)


def full_weight(x: Tensor) -> Tensor:
    """All of ``x``, without gradient. Collective if it is sharded."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_shard(x: Tensor) -> Tensor:
    """This rank's part of ``x``, without gradient; writing to it writes to ``x``."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def cpu_copy(x: Tensor) -> Tensor:
    """This rank's part of ``x`` in memory of its own."""
    return local_shard(x).to("cpu", copy=True)


def state_like(parameter: Tensor, name: str, x: Tensor) -> Tensor:
    """A moment (or the step counter) as the optimizer keeps it beside ``parameter``."""
    own = x.to(parameter.device, copy=True)
    if name == "step" or not isinstance(parameter, DTensor):
        return own
    sharded: Tensor = DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded
