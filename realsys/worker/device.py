"""The device that a worker computes on: a GPU where its task was given one, and never the CPU instead.

Pure; whoever computes asks torch whether it sees a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from realsys.api.errors import ConfigError

# Set by a site whose GPUs are device files without a driver: only tests have such a site.
STAND_IN = "REALSYS_CPU_FOR_GPU"


def compute_device(gpus: float, *, sees_gpu: bool, worker: str, environ: Mapping[str, str]) -> str:
    """``cuda`` or ``cpu``, as the plan says.

    Args:
        gpus: of the worker's task.
        sees_gpu: whether torch finds one.
    Raises:
        ConfigError: the plan has a GPU for it and torch finds none. On the CPU it would take a hundred
            times as long, and nobody would be told.
    """
    if not gpus:
        return "cpu"
    if sees_gpu:
        return "cuda"
    if environ.get(STAND_IN) == "1":
        return "cpu"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(
        f"{worker} is planned with {gpus:g} GPU{'' if gpus == 1 else 's'}, and torch finds none here",
        where="CUDA_VISIBLE_DEVICES " + ("is not set" if visible is None else f"is {visible!r}"),
        fix="check the driver and that torch is built for CUDA (realsys doctor; "
        "python -m torch.utils.collect_env), or plan without GPUs",
    )
