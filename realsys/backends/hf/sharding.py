"""Shards weights, gathers them and copies them; the mechanics under fsdp.py.

A weight is split along the tensor axis first (tensor_parallel.py), then along dimension 0 over the data
axis. Every function also accepts unsharded weights, so callers need not distinguish.
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
from realsys.backends.hf.singleton_group import singleton_group
from realsys.models.skeleton import make_memory, skeleton
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import FSDP_WHOLE_BYTES

DATA, TENSOR = "data", "tensor"
_AT_ONCE = 1 << 24  # elements gathered together: bounds memory, does not affect results


def mesh_of(model: Model, *, lone_data: bool = False) -> DeviceMesh | None:
    """Returns the mesh of those axes of ``model`` that have several processes; None for a single
    process.

    ``lone_data``: include the data axis even if it has one process.
    """
    data, tensor = model.groups.data, model.groups.tensor
    if data is None and lone_data:
        data = singleton_group(model.device)
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
    """Shards each transformer layer separately, then the rest, in place, over the data axis.

    A small model is sharded in one piece, since collectives per layer would take longer than computing.
    Returns True in that case.

    Args:
        cpu_offload: shards, gradients and moments stay in CPU memory between passes.
        compute_dtype: dtype of gathered weights; gradients are reduced and summed in float32. None:
            everything in the dtype of the shards.
    """
    # Valid because the output is only indexed, never written to.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    pin = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy()
    # No inputs are cast: tokens are integers, everything else is computed from the gathered weights.
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
    """Size of the whole weights as gathered."""
    return sum(x.numel() * (dtype or x.dtype).itemsize for x in module.parameters())


def free_gathered_weights(module: nn.Module) -> None:
    """Frees the gathered weights that a forward pass has left behind; only the shards are up to date."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def plain_copy(cls: Any, module: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Makes an unsharded module of the same shape with uninitialised weights."""
    plain: Any = skeleton(lambda: cls(copy.deepcopy(module.config)))
    for parameter in plain.parameters():  # not plain.to(dtype): rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    make_memory(plain, device)
    if (found := getattr(module, "_weight_conversions", None)) is not None:
        plain._weight_conversions = (
            found  # conversions that transformers made on loading and undoes on saving
        )
    if (own := getattr(module, "generation_config", None)) is not None:
        plain.generation_config = copy.deepcopy(own)  # further end tokens
    moved: nn.Module = plain.to(device)
    return moved.eval().requires_grad_(False)


# ---- one weight ------------------------------------------------------------------------------


def cuts(x: Tensor) -> list[tuple[DeviceMesh, int]]:
    """Lists how ``x`` was split, first split first: (axis, dimension)."""
    if not isinstance(x, DTensor):
        return []
    mesh = x.device_mesh
    axes = zip(mesh.mesh_dim_names or (), x.placements, strict=True)
    # FSDP marks "split after the tensor axis" by a strided placement.
    found = [(_axis(mesh, name), p.dim) for name, p in axes if hasattr(p, "dim")]
    return found[::-1]


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns ``mesh[name]``, which takes longer than all else that is asked of a small weight."""
    made: dict[str, DeviceMesh] = mesh.__dict__.setdefault("_realsys_axes", {})
    if name not in made:
        made[name] = mesh[name]
    return made[name]


def is_cut_over_tensor_axis(x: Tensor) -> bool:
    """True if the tensor ranks hold different parts of ``x``."""
    return any(mesh.mesh_dim_names == (TENSOR,) for mesh, _ in cuts(x))


def boxes(x: Tensor) -> list[Box]:
    """Boxes of ``x``: the whole, and this process's part after each split; the last is its shard."""
    found = [Box.whole(tuple(x.shape))]
    for mesh, dim in cuts(x):
        found.append(_part(found[-1], dim, mesh.get_local_rank(), mesh.size()))
    return found


def _part(box: Box, dim: int, rank: int, size: int) -> Box:
    """Returns the part of ``box`` that a split in ``dim`` assigns to ``rank`` of ``size`` ranks."""
    start, stop = list(box.start), list(box.stop)
    length = stop[dim] - start[dim]
    each = math.ceil(length / size)  # torch.chunk's rule: the last parts are shorter or empty
    first = min(rank * each, length)
    stop[dim] = start[dim] + min(first + each, length)
    start[dim] += first
    return Box(tuple(start), tuple(stop))


def full_weight(x: Tensor) -> Tensor:
    """Returns all of ``x``, without gradient. Collective if sharded; else ``x``'s own memory."""
    ((_, whole),) = full_weights([("", x)])
    return whole


def full_weights(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Gathers ``full_weight`` of each, in order, with as few collectives as memory allows.

    A collective for a small weight is nearly all latency, and a model has hundreds of them.

    Args:
        dtype: dtype of the result, cast before gathering. None: unchanged.
    """
    alike: list[tuple[str, Tensor]] = []  # split alike, and not yet gathered
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
    """Gathers weights that were split alike, undoing the last split first."""
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
    """Concatenates each of ``parts`` with those of the other ranks of ``mesh``, in one collective.

    Args:
        wholes: box of each result, and the dimension of its split.
    """
    size = mesh.size()
    shapes = [[_part(box, dim, rank, size).shape for box, dim in wholes] for rank in range(size)]
    longest = sum(map(math.prod, shapes[0]))  # the first rank's part is the largest
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
    """Returns this rank's part of ``x``, without gradient; writing to it writes to ``x``."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the gradient of ``local_shard(parameter)``; writing to it writes to the gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # noqa: SIM102
        if gradient.placements != parameter.placements:
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return local_shard(gradient)


def cpu_copy(x: Tensor) -> Tensor:
    """Copies this rank's part of ``x`` to new CPU memory."""
    return local_shard(x).to("cpu", copy=True)
