"""Broadcasts results of the last pipeline stage to all processes of the slot.

Its first tensor rank sends. The others compute the same, but a GPU may round differently, and decisions
based on a figure must be equal everywhere. Plain tensors are sent, nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from realsys.backends.megatron.megatron_groups import MegatronGroups

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def metrics_from_last_stage(
    figures: Mapping[str, float] | None, groups: MegatronGroups, device: torch.device
) -> dict[str, float]:
    """Broadcasts the last stage's ``figures`` (others pass None), bit for bit."""
    text = json.dumps(figures).encode()
    carrier = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    told = tensor_from_last_stage(None if figures is None else carrier, groups, device)
    return dict(json.loads(bytes(told.tolist())))


def tensor_from_last_stage(
    x: Tensor | None, groups: MegatronGroups, device: torch.device
) -> Tensor:
    """Broadcasts the last stage's ``x`` (1 to 6 dimensions; other stages pass None)."""
    if x is not None and dist.get_world_size(groups.slot) == 1:
        return x
    header = torch.zeros(8, dtype=torch.int64, device=device)
    if x is not None:
        header[: 2 + x.ndim] = torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape])
    _broadcast(header, groups)
    dtype, ndim, *shape = header.tolist()
    told = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device) if x is None else x
    told = told.contiguous()
    _broadcast(told.view(torch.uint8), groups)  # not every backend supports every dtype
    return told


def _broadcast(x: Tensor, groups: MegatronGroups) -> None:
    topo = groups.topology
    head = (topo.pipeline - 1) * topo.tensor  # rank in the slot, which is ordered by stage
    dist.broadcast(x, group=groups.slot, group_src=head)
