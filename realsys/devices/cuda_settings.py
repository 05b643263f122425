"""Torch settings of a compute process, made once at its start and equal in every role.

``settings_for`` decides; ``apply`` makes the settings. Environment variables that CUDA reads at its start
(cuBLAS workspace, allocator configuration) are set where a task is started: realsys/worker/environment.py.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch

# Fraction of a GPU share that torch may use; the rest is for memory that torch does not count,
# mainly CUDA's.
COUNTED_BY_TORCH = 0.95


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """Torch settings of a process.

    Attributes:
        debug_mode: of ``torch.set_deterministic_debug_mode``.
        fill_memory: fill new memory if results must repeat, so that none depends on its earlier content.
        cudnn_attention: cuDNN may compute attention.
        memory_fraction: of the GPU, for this process; None: all.
    """

    debug_mode: Literal["default", "warn", "error"]
    fill_memory: bool = True
    cudnn_attention: bool = True
    memory_fraction: float | None = None


def settings_for(
    device: str, *, deterministic: bool | None = None, gpus: float = 0.0
) -> TorchSettings:
    """Chooses the settings of a process (pure).

    Args:
        deterministic: equal runs give equal bits. None: yes on the CPU, where it costs nothing; no
            on a GPU.
        gpus: GPUs of the task; below 1, other tasks share the GPU.
    """
    if not device.startswith("cuda"):
        return TorchSettings(debug_mode="default" if deterministic is False else "warn")
    return TorchSettings(
        # "warn" would combine both drawbacks: flash attention's backward would stay unordered and
        # cuBLAS free to choose, while scatters are sorted and memory is filled.
        debug_mode="error" if deterministic else "default",
        fill_memory=False,  # realsys reads no memory that it has not written
        # It makes a plan for every exact shape, half a second each, and ours are new in every batch.
        cudnn_attention=False,
        memory_fraction=gpus * COUNTED_BY_TORCH if 0 < gpus < 1 else None,
    )


def apply(settings: TorchSettings) -> None:
    """Applies the settings to torch in this process."""
    # As use_deterministic_algorithms(…), which imports the whole compiler (1.4 s of every start) only to
    # tell it so.
    torch.set_deterministic_debug_mode(settings.debug_mode)
    if not settings.fill_memory:
        # A property of the module's own class.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not settings.cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if settings.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(settings.memory_fraction)
    warnings.filterwarnings("once", category=UserWarning)
