"""What this process and others have of its GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes.

    Attributes:
        peak: in use by this process's tensors at most.
        reserved: held by torch in this process.
        others: in use besides: by other processes, and by CUDA and NCCL.
        total: of the GPU.
    """

    peak: int
    reserved: int
    others: int
    total: int


def gpu_memory() -> GpuMemory:
    """Of the current GPU, now."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return GpuMemory(
        peak=torch.cuda.max_memory_allocated(),
        reserved=reserved,
        others=max(0, total - free - reserved),
        total=total,
    )
