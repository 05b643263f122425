"""Finds settings that change nothing in a plan: what was meant by them does not happen.

For launch and plan, which warn of them. A setting is idle when the workers' configurations and the tasks
are the same without it. No list is kept: each plan is looked at anew, since most settings mean something
in one mode only (`schedule.servers` in a synchronous run, `sft.seed` beside `actor.path`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from realsys.api.cluster import ClusterSpec
from realsys.api.experiment import Experiment
from realsys.api.plan import PhasePlan
from realsys.api.scheduling import WorkerType
from realsys.config.overrides import apply_overrides
from realsys.config.settings import UserSetting

MOST_SETTINGS = 24  # that are looked at: each takes some milliseconds, more with many workers
MOST_WORKERS = 256
_ABSENT = object()
LOOK_S = 3.0  # for an experiment that takes its time


def consumed(experiment: Experiment) -> Iterator[Any]:
    """Yields all that reaches workers and scheduler: configuration, in which most settings are seen, and
    tasks of the experiment, then those of its phases."""
    phases = experiment.prepared_by()
    for phase in phases:
        experiment = experiment.with_prepared(phase.name, f"/prepared/{phase.name}")
    yield experiment.initial_setup()
    yield experiment.scheduling.apply_to(experiment.scheduling_setup())
    for phase in phases:
        yield from consumed(phase.experiment)


def _equals(found: Iterator[Any], whole: Sequence[Any]) -> bool:
    """Whether an iterator yields these values; makes none behind the first other one."""
    others = iter(whole)
    if any(next(others, _ABSENT) != value for value in found):
        return False
    return next(others, _ABSENT) is _ABSENT


def idle_settings(defaults: Experiment, settings: Sequence[UserSetting]) -> Iterator[UserSetting]:
    """Those of ``settings`` without which ``defaults`` would give the same, and which are no defaults."""
    options = apply_overrides(defaults, settings).options
    until_s, whole = time.monotonic() + LOOK_S, None
    with suppress(Exception):  # an experiment that does more than to say what it needs
        whole = [*consumed(options)]
    if whole is None or sum(group.count for group in whole[1].groups().values()) > MOST_WORKERS:
        return
    for setting in settings[:MOST_SETTINGS]:
        if time.monotonic() > until_s:
            return
        others = apply_overrides(defaults, [s for s in settings if s is not setting]).options
        if others == options:
            continue
        same = False
        with suppress(Exception):  # without it there is no plan at all, or the experiment's own bug
            same = _equals(consumed(others), whole)
        if same:
            yield setting


def idle_warnings(defaults: Experiment, settings: Sequence[UserSetting]) -> Iterator[str]:
    """A line for each."""
    for setting in idle_settings(defaults, settings):
        yield (
            f"{setting.path} has no effect here ({setting.origin}): workers and tasks are the same without "
            "it"
        )


_GPUS_OF = {
    WorkerType.MODEL_WORKER: "scheduling.model_worker.gpu=1",
    WorkerType.GENERATION_SERVER: "scheduling.generation_server.gpu=1",
}


def idle_gpu_warnings(phases: Sequence[PhasePlan], cluster: ClusterSpec) -> Iterator[str]:
    """Of GPUs in the tasks' partition where the tasks ask for none, a line for each partition.

    Generation servers beside model workers that have GPUs are the experiment's to speak of.
    """
    found: dict[str, dict[WorkerType, list[str]]] = {}
    for phase in phases:
        groups = phase.scheduling.groups()
        idle = [k for k in _GPUS_OF if k in groups and not groups[k].scheduling.gpu]
        for kind in idle if WorkerType.MODEL_WORKER in idle else ():
            name = groups[kind].scheduling.partition or cluster.slurm.partition or ""
            if name in cluster.partitions and cluster.partitions[name].gpus:
                found.setdefault(name, {}).setdefault(kind, []).append(phase.name)
    for name, kinds in found.items():
        who = " and ".join(f"{k.value} tasks (phase {', '.join(kinds[k])})" for k in kinds)
        yield (
            f"{who} compute on CPUs: they ask for no GPU, and partition {name!r} has "
            f"{cluster.partitions[name].gpus} a node. To use them: {' '.join(_GPUS_OF[k] for k in kinds)}"
        )
