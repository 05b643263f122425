"""The CPUs and GPUs that Slurm gave a task on its node, so that it can be restarted on the same ones.

A restarted worker gets a step of its own, which sees everything that the job has on the node, because the
first step's share is still allocated. It restricts itself to the CPUs and GPUs of the first start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from realsys.api.plan import StepPlan
from realsys.slurm.gpus import gpu_ids, same_devices


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """``hosts/<type>-<i>.json``: written by the task's wrapper at its first start.

    Attributes:
        cpus: numbers of the CPUs that it may run on.
        gpu_ids: Slurm's numbers of its GPUs on the node; empty if Slurm does not report them.
        devices: its CUDA_VISIBLE_DEVICES.
    """

    cpus: tuple[int, ...]
    gpu_ids: tuple[str, ...] = ()
    devices: str = ""


def place_of_task(step: StepPlan, devices: str, environ: Mapping[str, str]) -> TaskPlace:
    """Returns the place of this process, given its CUDA_VISIBLE_DEVICES and the environment from Slurm."""
    ids: tuple[str, ...] = ()
    if step.gpus_per_task:
        local = int(environ.get("SLURM_LOCALID", "0"))
        ids = gpu_ids(environ.get("SLURM_STEP_GPUS"), local, step.gpus_per_task)
    return TaskPlace(cpus=tuple(sorted(os.sched_getaffinity(0))), gpu_ids=ids, devices=devices)


def devices_at(place: TaskPlace, environ: Mapping[str, str]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for the GPUs of ``place``, in the environment of another step (pure).

    Uses Slurm's numbers: if a step can access only its own devices (ConstrainDevices), CUDA numbers these
    from 0, so the entries of one step mean nothing in another. If Slurm reports no numbers, the recorded
    entries are used.
    """
    visible, step_gpus = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("SLURM_STEP_GPUS")
    found = same_devices(place.gpu_ids, step_gpus=step_gpus, visible=visible)
    return place.devices if found is None else found


def keep_to_cpus(place: TaskPlace) -> None:
    """Restricts this process and its children to the CPUs of ``place``, as far as it may use them."""
    cpus = set(place.cpus) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
