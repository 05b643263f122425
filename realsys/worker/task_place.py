"""Where a task sits on its node: which CPUs and GPUs Slurm gave it, so that it can be started again there.

A worker that is started again gets a step of its own, which sees all that the job has on the node, since
the first step's share is still taken. It keeps to the CPUs and GPUs of the first start by itself.
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
        gpu_ids: Slurm's numbers of its GPUs on the node; empty where Slurm does not tell.
        devices: its CUDA_VISIBLE_DEVICES.
    """

    cpus: tuple[int, ...]
    gpu_ids: tuple[str, ...] = ()
    devices: str = ""


def place_of_task(step: StepPlan, devices: str, environ: Mapping[str, str]) -> TaskPlace:
    """Of this process, given its CUDA_VISIBLE_DEVICES and the environment from Slurm."""
    ids: tuple[str, ...] = ()
    if step.gpus_per_task:
        local = int(environ.get("SLURM_LOCALID", "0"))
        ids = gpu_ids(environ.get("SLURM_STEP_GPUS"), local, step.gpus_per_task)
    return TaskPlace(cpus=tuple(sorted(os.sched_getaffinity(0))), gpu_ids=ids, devices=devices)


def devices_at(place: TaskPlace, environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for the GPUs of ``place``, in the environment of another step (pure).

    By Slurm's numbers: where a step's devices are cut off from others (ConstrainDevices), CUDA counts
    those that are left from 0, so the entries of one step mean nothing in another. Where Slurm tells no
    numbers, the entries stand.
    """
    visible, step_gpus = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("SLURM_STEP_GPUS")
    found = same_devices(place.gpu_ids, step_gpus=step_gpus, visible=visible)
    return place.devices if found is None else found


def keep_to_cpus(place: TaskPlace) -> None:
    """This process and its children run on the CPUs of ``place``, if it may use them."""
    cpus = set(place.cpus) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
