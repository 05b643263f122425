"""A process group of this process alone, for libraries that require a group.

FSDP's CPU offload needs a mesh, Megatron-Core a group for every axis. No other process takes part, and a
process without torch.distributed gets a world of size one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# The world in which the group was made, and the group. Both are made once per process, unless
# torch.distributed is shut down and initialised again.
_singleton: dict[str, Any] = {}


def singleton_group(device: str) -> Any:
    """Returns the group of this process alone; the same one as long as its world exists.

    Args:
        device: the device on which this process computes.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.group.WORLD
    if _singleton.get("world") is not world:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        _singleton.update(world=world, group=group)
    return _singleton["group"]
