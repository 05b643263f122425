"""Translates a GPU out-of-memory error: what was computed, its planned memory, which settings to lower."""

from __future__ import annotations

from contextlib import suppress

import torch

from realsys.api.errors import OutOfMemory, RealsysError
from realsys.api.experiment import ExperimentConfig

# Messages of libraries that allocate GPU memory outside torch's allocator.
_OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)


def explain_out_of_memory(
    error: Exception, *, doing: str, worker: int, config: ExperimentConfig
) -> Exception:
    """Returns an ``OutOfMemory`` error in place of ``error`` if GPU memory ran out, else ``error``
    itself.

    Args:
        doing: name of the call or request that failed.
    """
    if not _is_out_of_memory(error):
        return error
    from realsys.planner.memory.memory_messages import out_of_memory
    from realsys.planner.memory.memory_of_workers import memory_of_experiment

    planned = None
    with suppress(RealsysError):  # an unreadable model directory must not hide the memory error
        planned = memory_of_experiment(config).get(worker)
    if planned is not None and doing == "Evaluate":
        doing = next((name for name in planned.calls if name.startswith("evaluation of")), doing)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    reported: OutOfMemory = out_of_memory(
        doing,
        where=f"model_worker/{worker}",
        peak=torch.cuda.max_memory_allocated(),
        reserved=reserved,
        others=max(0, total - free - reserved),  # of other processes, and of CUDA and NCCL
        total=total,
        planned=planned,
    )
    reported.add_note(f"{type(error).__name__}: {error}")
    return reported


def _is_out_of_memory(error: Exception) -> bool:
    from_torch = isinstance(error, torch.OutOfMemoryError)
    return from_torch or any(words in str(error) for words in _OUT_OF_MEMORY_TEXTS)
