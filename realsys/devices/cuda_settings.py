"""Torch's switches in a process that computes, set once at its start, the same ones in every role.

``settings_for`` decides; ``apply`` does it. What must be in the environment before CUDA starts (the
workspace of cuBLAS, how memory is cut) is set where a task is started: realsys/worker/environment.py.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch

# Of a GPU's share: the rest is for what torch does not count, first of all CUDA's own memory.
COUNTED_BY_TORCH = 0.95


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """Switches.

    Attributes:
        debug_mode: of ``torch.set_deterministic_debug_mode``.
        fill_memory: new memory is filled where results must repeat, so that none depends on what was there.
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
    """Switches of a process (pure).

    Args:
        deterministic: equal runs give equal bits. None: on the CPU, where it costs nothing, they do;
            on a GPU they need not.
        gpus: of the task; below 1 others are on the same GPU.
    """
    if not device.startswith("cuda"):
        return TorchSettings(debug_mode="default" if deterministic is False else "warn")
    return TorchSettings(
        # "warn" would be the worst of both: warned of, flash attention's backward stays unordered and
        # cuBLAS free to choose, while scatters are sorted and memory is filled.
        debug_mode="error" if deterministic else "default",
        fill_memory=False,  # we read nothing that we have not written
        # It makes a plan for every exact shape, half a second each, and ours are new in every batch.
        cudnn_attention=False,
        memory_fraction=gpus * COUNTED_BY_TORCH if 0 < gpus < 1 else None,
    )


def apply(settings: TorchSettings) -> None:
    """Sets torch's switches in this process."""
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
