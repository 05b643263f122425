"""A GPU that is full, in our words: what was computed, what that needs by plan, which settings to lower."""

from __future__ import annotations

from contextlib import suppress

import torch

from realsys.api.errors import OutOfMemory, RealsysError
from realsys.api.experiment import ExperimentConfig
from realsys.devices.gpu_memory import gpu_memory

# Of those who take GPU memory without torch's allocator.
_SAID = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 'out of memory'",
         "Cuda failure 2 'out of memory'")  # fmt: skip


def in_our_words(
    error: Exception, *, doing: str, worker: int, config: ExperimentConfig
) -> Exception:
    """``error``, or what stands for it where it says that the GPU's memory ran out.

    Args:
        doing: name of the call, or of another request.
    """
    if not _says_so(error):
        return error
    from realsys.planner.memory.memory_of_workers import memory_of_experiment
    from realsys.planner.memory.memory_words import out_of_memory

    planned = None
    with suppress(RealsysError):  # a directory that can't be read is not what is wrong now
        planned = memory_of_experiment(config).get(worker)
    if planned is not None and doing == "Evaluate":
        doing = next((name for name in planned.calls if name.startswith("evaluation of")), doing)
    now = gpu_memory()
    told: OutOfMemory = out_of_memory(
        doing,
        where=f"model_worker/{worker}",
        peak=now.peak,
        reserved=now.reserved,
        others=now.others,
        total=now.total,
        planned=planned,
    )
    told.add_note(f"{type(error).__name__}: {error}")
    return told


def _says_so(error: Exception) -> bool:
    is_torchs = isinstance(error, torch.OutOfMemoryError)
    return is_torchs or any(words in str(error) for words in _SAID)
