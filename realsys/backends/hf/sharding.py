"""Weights in shards: cut, gathered, copied out and put back. Mechanics only; fsdp.py decides.

A weight is cut along the tensor axis first (tensor_parallel.py), then along dimension 0 over the data
axis. Without shards every function here does the plain thing, so callers need not ask.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from realsys.api.model import Model
from realsys.backends.hf.group_of_one import group_of_one
from realsys.models.skeleton import make_memory, skeleton
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import FSDP_WHOLE_BYTES

DATA, TENSOR = "data", "tensor"
_AT_ONCE = 1 << 24  # numbers that are gathered together: bounds memory, not results


def mesh_of(model: Model, *, lone_data: bool = False) -> DeviceMesh | None:
    """The axes of ``model`` that have several processes; None for a single process.

    ``lone_data``: with a data axis even where it has one process.
    """
    data, tensor = model.groups.data, model.groups.tensor
    if data is None and lone_data:
        data = group_of_one(model.device)
    named = {name: group for name, group in ((DATA, data), (TENSOR, tensor)) if group is not None}
    kind = torch.device(model.device).type
    if not named:
        return None
    if len(named) == 1:
        ((name, group),) = named.items()
        return DeviceMesh.from_group(group, kind, mesh_dim_names=(name,))
    workers = dist.get_process_group_ranks(model.groups.copy)  # ranks are row-major: data, tensor
    shape = (model.topology.data, model.topology.tensor)
    mesh = torch.tensor(workers).view(shape)
    return DeviceMesh.from_group([data, tensor], kind, mesh=mesh, mesh_dim_names=(DATA, TENSOR))


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    cpu_offload: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> bool:
    """Shards each transformer layer by itself, then the rest, in place, over the data axis.

    A small model is one piece: its layers' collectives would take longer than what they compute.
    Gives whether it is.

    Args:
        cpu_offload: shards, gradients and moments live in CPU memory between the passes.
        compute_dtype: weights are gathered in this type; gradients are reduced, and their sums kept,
            in float32. None: all in the type of the shards.
    """
    # True of its output, which we index and never write to.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    pin = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy()
    # No inputs are cast: tokens are integers, and all else is made of the gathered weights.
    types = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32 if compute_dtype else None,
        cast_forward_inputs=False,
    )
    in_layers = cpu_offload or _num_bytes(module, compute_dtype) > FSDP_WHOLE_BYTES
    kinds = set(getattr(module, "_no_split_modules", None) or ()) if in_layers else set()
    for part in module.modules():
        if type(part).__name__ in kinds:
            fully_shard(part, mesh=mesh, offload_policy=policy, mp_policy=types)
    fully_shard(module, mesh=mesh, offload_policy=policy, mp_policy=types)
    return not in_layers


def _num_bytes(module: nn.Module, dtype: torch.dtype | None) -> int:
    """Of the whole weights, as they are gathered."""
    return sum(x.numel() * (dtype or x.dtype).itemsize for x in module.parameters())


def settle(module: nn.Module) -> None:
    """Frees the whole weights that a forward pass has left behind; only the shards are true."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def plain_copy(cls: Any, module: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """An unsharded module of the same shape; its weights are to be filled in."""
    plain: Any = skeleton(lambda: cls(copy.deepcopy(module.config)))
    for parameter in plain.parameters():  # not plain.to(dtype): rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    make_memory(plain, device)
    if (found := getattr(module, "_weight_conversions", None)) is not None:
        plain._weight_conversions = (
            found  # what transformers did when it loaded, and undoes to save
        )
    if (own := getattr(module, "generation_config", None)) is not None:
        plain.generation_config = copy.deepcopy(own)  # further ends of an answer
    moved: nn.Module = plain.to(device)
    return moved.eval().requires_grad_(False)


# ---- one weight ------------------------------------------------------------------------------


def cuts(x: Tensor) -> list[tuple[DeviceMesh, int]]:
    """How ``x`` was cut, first cut first: (axis, dimension)."""
    if not isinstance(x, DTensor):
        return []
    mesh = x.device_mesh
    axes = zip(mesh.mesh_dim_names or (), x.placements, strict=True)
    # A strided placement is FSDP's word for "cut after the tensor axis".
    found = [(mesh[name], placement.dim) for name, placement in axes if hasattr(placement, "dim")]
    return found[::-1]


def is_cut_over_tensor_axis(x: Tensor) -> bool:
    """Whether the tensor ranks of a slot hold different parts of ``x``."""
    return any(mesh.mesh_dim_names == (TENSOR,) for mesh, _ in cuts(x))


def boxes(x: Tensor) -> list[Box]:
    """The whole of ``x`` and what is left to this process after each cut; the last is its shard."""
    found = [Box.whole(tuple(x.shape))]
    for mesh, dim in cuts(x):
        found.append(_part(found[-1], dim, mesh.get_local_rank(), mesh.size()))
    return found


def _part(box: Box, dim: int, rank: int, size: int) -> Box:
    """What a cut in ``dim`` leaves to ``rank`` of ``size`` ranks."""
    start, stop = list(box.start), list(box.stop)
    length = stop[dim] - start[dim]
    each = math.ceil(length / size)  # torch.chunk's rule: last ones shorter or empty
    first = min(rank * each, length)
    stop[dim] = start[dim] + min(first + each, length)
    start[dim] += first
    return Box(tuple(start), tuple(stop))


def full_weight(x: Tensor) -> Tensor:
    """All of ``x``, without gradient. Collective if it is sharded; else ``x``'s own memory."""
    ((_, whole),) = full_weights([("", x)])
    return whole


def full_weights(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """``full_weight`` of each, in order, with as few collectives as memory allows.

    A collective for a small weight is nearly all waiting, and a model has hundreds of them.

    Args:
        dtype: to give them in, cast before they are gathered. None: as they are.
    """
    alike: list[tuple[str, Tensor]] = []  # cut alike, and not yet gathered
    kind, numbers = None, 0
    for name, x in named:
        own = (x.dtype, x.device, [mesh for mesh, _ in cuts(x)])
        if alike and (own != kind or numbers + x.numel() > _AT_ONCE):
            yield from _gathered(alike, dtype)
            alike, numbers = [], 0
        alike.append((name, x.detach()))
        kind, numbers = own, numbers + x.numel()
    if alike:
        yield from _gathered(alike, dtype)


def _gathered(
    alike: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The cuts undone, last one first."""
    parts = [local_shard(x) for _, x in alike]
    if dtype is not None:
        parts = [x.to(dtype) if x.is_floating_point() else x for x in parts]
    all_cuts, all_boxes = [cuts(x) for _, x in alike], [boxes(x) for _, x in alike]
    for last in range(len(all_cuts[0]) - 1, -1, -1):
        wholes = [(b[last], c[last][1]) for b, c in zip(all_boxes, all_cuts, strict=True)]
        parts = _joined(parts, wholes, all_cuts[0][last][0])
    return zip((name for name, _ in alike), parts, strict=True)


def _joined(
    parts: Sequence[Tensor], wholes: Sequence[tuple[Box, int]], mesh: DeviceMesh
) -> list[Tensor]:
    """Each of ``parts`` with those of the other ranks of ``mesh``, in one collective.

    Args:
        wholes: what each becomes, and the dimension in which it was cut.
    """
    size = mesh.size()
    shapes = [[_part(box, dim, rank, size).shape for box, dim in wholes] for rank in range(size)]
    longest = sum(map(math.prod, shapes[0]))  # the first rank never has less than another
    flat = torch.cat([x.reshape(-1) for x in parts]).to(mesh.device_type)
    padded = torch.cat([flat, flat.new_zeros(longest - len(flat))])
    found = list(padded.new_empty(size, longest))
    dist.all_gather(found, padded, group=mesh.get_group())
    by_rank = []
    for row, own in zip(found, shapes, strict=True):
        sizes = list(map(math.prod, own))
        pieces = row[: sum(sizes)].split(sizes)
        by_rank.append([x.view(shape) for x, shape in zip(pieces, own, strict=True)])
    joined = zip(zip(*by_rank, strict=True), wholes, strict=True)
    return [torch.cat(pieces, dim=dim) for pieces, (_, dim) in joined]


def local_shard(x: Tensor) -> Tensor:
    """This rank's part of ``x``, without gradient; writing to it writes to ``x``."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def local_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of ``local_shard(parameter)``; writing to it writes to the gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # noqa: SIM102
        if gradient.placements != parameter.placements:
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_shard(gradient)


def cpu_copy(x: Tensor) -> Tensor:
    """This rank's part of ``x`` in memory of its own."""
    return local_shard(x).to("cpu", copy=True)
