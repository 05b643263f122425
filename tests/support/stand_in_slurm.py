"""A small trial that is planned for Slurm, and programs on PATH that stand in for Slurm's.

The plan: a master on the first node, two model workers on two nodes; in the layouts het and split the
model workers are a component of their own. Programs are shell scripts that write down how they were
called.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from experiments.ppo_math import ppo_math
from realsys.api.cluster import ClusterSpec, SlurmSpec
from realsys.api.plan import (
    JobComponent,
    JobLayout,
    JobPlan,
    LaunchPlan,
    PhasePlan,
    StepPlan,
    plan_text,
)
from realsys.api.scheduling import WorkerType
from realsys.trial.records import TrialFiles

MASTER, MODEL = WorkerType.MASTER_WORKER, WorkerType.MODEL_WORKER


def make_plan(
    root: Path,
    *,
    layout: JobLayout = JobLayout.SINGLE,
    requeue: bool = False,
    slurm: SlurmSpec | None = None,
    step: dict[str, object] | None = None,
    **cluster: object,
) -> LaunchPlan:
    """The plan; its files are under ``root``.

    Args:
        step: what is different in the model workers' step.
        cluster: what is different in the cluster spec.
    """
    apart = layout is not JobLayout.SINGLE
    model = StepPlan(
        worker_type=MODEL, component=int(apart), nodes=((2, 1),), cpus_per_task=1, memory_mib=50
    )
    master = StepPlan(worker_type=MASTER, nodes=((1, 1),), cpus_per_task=1, memory_mib=50)
    experiment = ppo_math()
    groups = experiment.scheduling_setup()
    phase = PhasePlan(
        name="main",
        experiment_name="ppo-math",
        folder=str(root / "run1"),
        publish=None,
        scheduling=replace(groups, model_worker=replace(groups.model_worker, count=2)),
        config=experiment.initial_setup().lazy_init().set_worker_information("ppo-math", "run1"),
        steps=(master, replace(model, **(step or {}))),
    )
    parts = [("trainer", (MASTER,), 1), ("model", (MODEL,), 2)]
    if not apart:
        parts = [("all", (MASTER, MODEL), 2)]
    components = tuple(
        JobComponent(
            name=name, worker_types=kinds, nodes=nodes, cpus_per_node=2, memory_mib_per_node=100
        )
        for name, kinds, nodes in parts
    )
    spec = ClusterSpec(
        name="site",
        scheduler="slurm",
        file_root=str(root),
        name_resolve=f"memory://{root}",
        slurm=slurm or SlurmSpec(accounting=False),
    )
    return LaunchPlan(
        experiment_name="ppo-math",
        trial_name="run1",
        user="anna",
        trial_dir=str(root / "run1"),
        cluster=replace(spec, **cluster),
        phases=(phase,),
        job=JobPlan(layout=layout, components=components, requeue=requeue),
    )


def write_plan(plan: LaunchPlan) -> TrialFiles:
    """The trial's folder with its plan."""
    files = TrialFiles(Path(plan.trial_dir))
    files.root.mkdir(parents=True, exist_ok=True)
    files.plan.write_text(plan_text(plan))
    return files


def program(folder: Path, name: str, shell: str) -> None:
    """Puts a program there; ``calls`` tells its arguments, a line a call."""
    folder.mkdir(exist_ok=True)
    log = shlex.quote(str(folder / f"{name}.calls"))
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$*" | tr -d "\\037\\036" >> {log}\n{shell}\n')
    path.chmod(0o755)


def calls(folder: Path, name: str) -> list[str]:
    """Arguments of each call of the program."""
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


SUBMITTED = 1795254690  # of the jobs of queue_row, in seconds since 1970


def queue_row(
    job_id: str,
    state: str,
    exit_code: str = "0:0",
    restarts: int = 0,
    *,
    submitted: int = SUBMITTED,
    cluster: str = "lab",
    comment: str = "(null)",
) -> str:
    """What squeue prints of a job, as launcher/slurm/query/job_query.py asks for it."""
    times = [str(submitted + 1), str(submitted), str(submitted + 3600)]
    row = [job_id, job_id, state, "None", "n1", *times, "1:00:00", str(restarts), exit_code]
    return "\x1f".join([*row, cluster, comment]) + "\x1e\n"


def wait_until(is_true: Callable[[], object], *, timeout_s: float = 240.0) -> None:
    """Looks every 10 ms."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
