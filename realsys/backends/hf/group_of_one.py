"""This process as a process group: for libraries that want a group where one process works alone.

FSDP's CPU offload wants a mesh, Megatron-Core a group for every axis. No other process is asked, and a
process without torch.distributed gets a world of one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# The world that the group was made in, and the group: both are made once a process, but where somebody
# ends torch.distributed and begins it anew.
_made: dict[str, Any] = {}


def group_of_one(device: str) -> Any:
    """The group of this process only; the same one as long as its world lasts.

    Args:
        device: that this process computes on; whether others are in the machine does not matter.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.group.WORLD
    if _made.get("world") is not world:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        _made.update(world=world, group=group)
    return _made["group"]
