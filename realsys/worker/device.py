"""Chooses a worker's compute device: a GPU if its task was given one, never the CPU instead.

Pure; the caller asks torch whether it finds a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from realsys.api.errors import ConfigError

# Set by a site whose GPUs are device files without a driver; only tests have such a site.
STAND_IN = "REALSYS_CPU_FOR_GPU"


def compute_device(gpus: float, *, sees_gpu: bool, worker: str, environ: Mapping[str, str]) -> str:
    """Returns ``cuda`` or ``cpu``, as planned.

    Args:
        gpus: of the worker's task.
        sees_gpu: whether torch finds one.
    Raises:
        ConfigError: a GPU is planned and torch finds none. Silently using the CPU would take a hundred
            times as long.
    """
    if not gpus:
        return "cpu"
    if sees_gpu:
        return "cuda"
    if environ.get(STAND_IN) == "1":
        return "cpu"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(
        f"{worker} is planned with {gpus:g} GPU{'' if gpus == 1 else 's'}, but torch finds none here",
        where="CUDA_VISIBLE_DEVICES " + ("is not set" if visible is None else f"is {visible!r}"),
        fix="check the driver and that torch is built for CUDA (realsys doctor; "
        "python -m torch.utils.collect_env), or plan without GPUs",
    )
