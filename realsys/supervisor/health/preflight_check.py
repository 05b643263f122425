"""Checks a job's nodes and GPUs before its workers start, if the plan asks for it.

Slurm has assigned the nodes, and a running job can't exchange one; so a run that must not start on a
faulty node ends here, with the node as its first failure. The mechanisms that leave out lost nodes then
leave out these too: the job's requeue, or `realsys resume --exclude`, which the status names.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from realsys.api.plan import JobComponent, LaunchPlan, StepPlan
from realsys.slurm.hostlist import compress
from realsys.slurm.preflight.drive import examine, place_of
from realsys.slurm.preflight.node_verdicts import Check, judge, to_leave_out
from realsys.slurm.preflight.rounds import Wanted, program
from realsys.slurm.step_command import het_group
from realsys.supervisor.steps.slurm_steps import (
    component_nodes,
    known_environment,
    srun_environment,
)
from realsys.supervisor.steps.step_numbers import note_steps, skip_former_numbers
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    Failure,
    PreflightRecord,
    TrialFiles,
    read_record,
    write_record,
)
from realsys.worker.environment import read_exports

logger = logging.getLogger(__name__)

PREFLIGHT = "preflight"  # in a worker's place, in its failures
CPU_PROCESSES = 2  # a node, where the plan uses no GPUs
# Variables that a launching shell had set
_OF_LIBRARIES = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "TORCH_",
    "CUDA_",
)


def preflight(
    plan: LaunchPlan,
    attempt: AttemptRecord,
    files: TrialFiles,
    attempt_files: AttemptFiles,
    goes_on: Callable[[], bool],
) -> list[Failure]:
    """Returns why the run must not start; empty if it may, or if the preflight is off.

    Args:
        goes_on: called repeatedly; returns False if a stop was requested.
    """
    if plan.job is None or plan.job.preflight == "off":
        return []
    began = time.time()
    skip_former_numbers(attempt_files, known_environment(plan))
    checks: list[Check] = []
    nodes: list[str] = []
    for index, held in enumerate(component_nodes(plan.job, dict(os.environ))):
        steps = [s for p in plan.phases for s in p.steps if s.component == index]
        component = plan.job.components[index]
        logger.info("preflight started nodes=%s mode=%s", compress(held), plan.job.preflight)
        checks += _checks(plan, component, steps, held, files, attempt_files, goes_on)
        nodes += held
        if not goes_on():
            return []
    ill = to_leave_out(checks, nodes)
    for check in checks:
        level = logging.INFO if check.ok else logging.WARNING
        word = {True: "ok", False: "bad", None: "not checked"}[check.ok]
        logger.log(level, "preflight check=%r %s: %s", check.name, word, check.what)
    took_s = time.time() - began
    results = tuple(asdict(check) for check in checks)
    mode = plan.job.preflight
    record = PreflightRecord(mode=mode, at=began, seconds=took_s, checks=results, ill=ill)
    write_record(attempt_files.preflight, record)
    logger.info("preflight done seconds=%.0f ill=%s", took_s, compress(sorted(ill)) or "none")
    if mode != "stop":
        return []
    return failures(
        checks, ill, plan.trial, host=attempt.host, former=_formerly_ill(files, attempt)
    )


def failures(
    checks: Iterable[Check],
    ill: Mapping[str, str],
    trial: str,
    *,
    host: str,
    former: Iterable[str],
) -> list[Failure]:
    """Returns one failure per faulty node; if no single node is at fault, one per failed check (pure).

    Args:
        host: of the supervisor.
        former: nodes that earlier attempts found faulty. One that appears again was not left out, so the
            job is not requeued because of it: it would be requeued for ever.
    """
    how = "found again by" if set(ill) & set(former) else "failed"
    leave_out = f"realsys resume {trial} --exclude {compress(sorted(ill))}"
    anyway = f"realsys resume {trial} --preflight warn"
    found = [
        (node, f"{why} ({how} the preflight)", leave_out) for node, why in sorted(ill.items())
    ] or [
        (
            host,
            f"{check.name}: {check.what} (the preflight)",
            f"{check.fix}; to run all the same: {anyway}",
        )
        for check in checks
        if check.ok is False
    ]
    worker, now = PREFLIGHT, time.time()
    return [
        Failure(worker=worker, host=where, pid=0, why=why, at=now, kind="Preflight", fix=fix)
        for where, why, fix in found
    ]


def _checks(
    plan: LaunchPlan,
    component: JobComponent,
    steps: Sequence[StepPlan],
    nodes: Sequence[str],
    files: TrialFiles,
    attempt_files: AttemptFiles,
    goes_on: Callable[[], bool],
) -> list[Check]:
    """Runs the checks on the nodes of one component."""
    gpus = component.gpus_per_node
    step = max(steps, key=lambda s: s.gpus_per_task)
    low, _, high = (plan.cluster.port_range or "").partition("-")
    taken_over = read_exports(files.task_environment)
    of_libraries = {n: v for n, v in taken_over.items() if n.startswith(_OF_LIBRARIES)}
    wanted = Wanted(
        nodes=tuple(nodes),
        device="cuda" if gpus else "cpu",
        processes=gpus or CPU_PROCESSES,
        gpus=gpus,
        gpu_type=component.gpu_type,
        lock=str(attempt_files.root / "preflight.lock"),
        interface=plan.cluster.interface or "",
        ports=(int(low), int(high)) if high else None,
        environment={**of_libraries, **plan.cluster.env_vars},
    )
    place = place_of(
        plan.cluster,
        step.container_image,
        gpu=gpus > 0,
        python=sys.executable,
        in_shell=False,  # the batch script has done that
        options=het_group(plan.job, step),
    )
    text = program()

    def note(argv: list[str]) -> None:
        name = "(realsys/slurm/preflight/node_program.py)"
        short = [name if word == text else word for word in argv]
        note_steps(attempt_files, [{"phase": "", "step": "preflight", "argv": short}])

    seen = examine(wanted, place, srun_environment(plan, step), goes_on=goes_on, note=note)
    return judge(wanted, seen)


def _formerly_ill(files: TrialFiles, attempt: AttemptRecord) -> set[str]:
    """Returns the nodes that earlier attempts of this trial found faulty."""
    found: set[str] = set()
    for former in files.all_attempts():
        if former.number < attempt.number:
            record = read_record(PreflightRecord, former.preflight)
            found |= set(record.ill) if record is not None else set()
    return found
