"""Memory use of this process and of others on its GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Memory use of a GPU, in bytes.

    Attributes:
        peak: peak use by this process's tensors.
        reserved: held by torch in this process.
        others: used outside torch: by other processes, and by CUDA and NCCL.
        total: size of the GPU's memory.
    """

    peak: int
    reserved: int
    others: int
    total: int


def gpu_memory() -> GpuMemory:
    """Reads the memory use of the current GPU."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return GpuMemory(
        peak=torch.cuda.max_memory_allocated(),
        reserved=reserved,
        others=max(0, total - free - reserved),
        total=total,
    )
