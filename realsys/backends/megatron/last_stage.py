"""What the last stage of a pipeline found out, told to all processes of the slot.

Its first tensor rank tells. The others compute the same, but a GPU may round it otherwise, and what
is decided by a figure must be decided alike everywhere. Plain tensors travel, nothing pickled.
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


def figures_from_last_stage(
    figures: Mapping[str, float] | None, company: MegatronGroups, device: torch.device
) -> dict[str, float]:
    """``figures`` as the last stage has them (others pass None), bit for bit."""
    text = json.dumps(figures).encode()
    carrier = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    told = tensor_from_last_stage(None if figures is None else carrier, company, device)
    return dict(json.loads(bytes(told.tolist())))


def tensor_from_last_stage(
    x: Tensor | None, company: MegatronGroups, device: torch.device
) -> Tensor:
    """The last stage's ``x`` (1 to 6 dimensions; other stages pass None)."""
    if x is not None and dist.get_world_size(company.slot) == 1:
        return x
    header = torch.zeros(8, dtype=torch.int64, device=device)
    if x is not None:
        header[: 2 + x.ndim] = torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape])
    _tell(header, company)
    dtype, ndim, *shape = header.tolist()
    told = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device) if x is None else x
    told = told.contiguous()
    _tell(told.view(torch.uint8), company)  # not every backend knows every dtype
    return told


def _tell(x: Tensor, company: MegatronGroups) -> None:
    topo = company.topology
    head = (topo.pipeline - 1) * topo.tensor  # rank in the slot, which goes stage by stage
    dist.broadcast(x, group=company.slot, group_src=head)
