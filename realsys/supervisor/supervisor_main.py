"""The supervisor process, on one machine or a cluster's first node. job_entry.py calls ``supervise``."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from realsys.api.plan import JobLayout, JobPlan, LaunchPlan, read_plan
from realsys.name_resolve.key_table import TrialKeys
from realsys.observability.worker_logs import configure_logging
from realsys.runtime.child_processes.parent_death import die_with_parent
from realsys.runtime.failures import failure_of
from realsys.slurm.hostlist import expand
from realsys.slurm.job_identity import JobIdentity
from realsys.slurm.lost_nodes import is_silence, lost_nodes
from realsys.supervisor.attempt.attempt import Job, claim_attempt, end_attempt
from realsys.supervisor.health.preflight_check import PREFLIGHT, preflight
from realsys.supervisor.job_etcd.job_store import JobStore, former_store
from realsys.supervisor.products import last_step
from realsys.supervisor.signals import (
    can_leave_out,
    cancel_job,
    is_cancelled,
    leave_out,
    listen_to_signals,
    requeue_job,
)
from realsys.supervisor.split_jobs.component_board import ComponentBoard
from realsys.supervisor.split_jobs.split_steps import SplitSteps
from realsys.supervisor.steps.local_steps import LocalSteps
from realsys.supervisor.steps.slurm_steps import SlurmSteps, component_nodes
from realsys.supervisor.steps.steps import Steps
from realsys.supervisor.supervisor import Supervisor
from realsys.trial.records import AttemptFiles, ExitMarker, Result, TrialFiles, write_record
from realsys.worker.requeued import linger, newer_attempt_of_same_job

logger = logging.getLogger(__name__)

ARTIFACTS_TIMEOUT_S = 120


def supervise(trial_dir: str, plan_hash: str) -> int:
    """Runs one attempt of the trial in ``trial_dir``. Returns 0 if it completed, else 1.

    Raises:
        ConfigError: the plan was changed. TrialIsLive: an attempt runs already.
    """
    files = TrialFiles(Path(trial_dir))
    plan = read_plan(files.plan, expected_hash=plan_hash)
    if plan.job is None:  # Slurm ends a batch script and its steps together; a laptop does not
        die_with_parent(os.getppid(), signal.SIGTERM)
    job = Job.from_environment(os.environ)
    opened = JobStore.open(plan, job.nodes, was_open_before=bool(files.all_attempts()))
    keys = TrialKeys.of(plan)
    try:
        return _supervise(plan, plan_hash, files, job, opened, keys)
    finally:
        opened.close()


def _supervise(
    plan: LaunchPlan,
    plan_hash: str,
    files: TrialFiles,
    job: Job,
    opened: JobStore,
    keys: TrialKeys,
) -> int:
    store = opened.store
    record, attempt_files = claim_attempt(
        files,
        store,
        keys,
        job=job,
        former=former_store(plan, store),
        patience_s=float(plan.cluster.store_patience_seconds),
    )
    opened.write_access(attempt_files)
    log_to(attempt_files.log("supervisor"), "supervisor")
    board = ComponentBoard(record, store, keys, job.nodes)
    steps = make_steps(plan, plan_hash, files, attempt_files, board)
    supervisor = Supervisor(
        plan,
        plan_hash,
        record,
        files,
        attempt_files,
        store,
        keys,
        steps,
        opened.look_after,
        functools.partial(preflight, plan, record, files, attempt_files),
    )
    try:
        requeue = listen_to_signals(supervisor, plan)
        supervisor.keep_room()
        began_at = {p.name: last_step(TrialFiles.phase(p.folder)) for p in plan.phases}
        marker = _run(supervisor, attempt_files, plan, record.number)
        end_attempt(store, keys, record)
        supervisor.give_room()
        write_record(attempt_files.exit, marker)
        logger.info("attempt ended number=%d result=%s", record.number, marker.result)
        identity = JobIdentity(
            job_id=job.job_id, began_at=record.started_at, restarts=job.restart_count
        )
        comes_back = False
        if not _is_by_a_user(supervisor.stop_watch.requested_by):  # that is final
            comes_back = goes_on_by_itself(plan, marker, began_at=began_at)
            comes_back = (
                _leave_out_lost_nodes(plan, identity, job.nodes, marker, began_at=began_at)
                or comes_back
            )
        if newer_attempt_of_same_job(files, record.number) is not None:
            logger.warning("the job was requeued; waiting for Slurm to end this incarnation")
            linger()
    finally:
        if isinstance(steps, SplitSteps):
            steps.close()  # in any case: the other jobs hold nodes
    comes_back = comes_back or (marker.result is Result.STOPPED and requeue.is_set())
    # Requeue first: Slurm may end this process before a picture is drawn. The next incarnation does it.
    if not (comes_back and requeue_job(job.job_id, identity)):
        _write_artifacts(files)
        if plan.job is not None and _is_stopped_by_user(marker, supervisor, plan.job):
            cancel_job(job.job_id, identity)
    if plan.job is not None and marker.result is not Result.COMPLETED:
        raise SystemExit(1)  # so that the job's state, and jobs that depend on it, are right
    return 0 if marker.result is Result.COMPLETED else 1


def goes_on_by_itself(plan: LaunchPlan, marker: ExitMarker, *, began_at: Mapping[str, int]) -> bool:
    """Returns whether the job is requeued though no node is known to be at fault: workers only lost each
    other, or all fell silent (pure).

    Args:
        began_at: phase → its last step before the attempt. An attempt that completed no later one is not
            requeued: it might end so for ever.
    """
    first = marker.first_failure
    return (
        plan.job is not None
        and plan.job.requeue
        and marker.result is Result.FAILED
        and first is not None
        and (first.secondary or is_silence(first))
        and _has_got_on(marker, began_at)
    )


def _has_got_on(marker: ExitMarker, began_at: Mapping[str, int]) -> bool:
    return marker.step > began_at.get(marker.phase, 0)


def _leave_out_lost_nodes(
    plan: LaunchPlan,
    job: JobIdentity,
    nodes: str,
    marker: ExitMarker,
    *,
    began_at: Mapping[str, int],
) -> bool:
    """Returns whether the attempt lost nodes and is requeued; makes its job's next start avoid them.

    Args:
        began_at: as of goes_on_by_itself. An attempt without a later step is requeued only if its next
            start is another one: some of its nodes were well, and those lost are left out. All nodes can
            be blamed for what is the image's fault. The preflight sees to it itself that it does not
            blame a node again (realsys/supervisor/health/preflight_check.py).
    """
    if plan.job is None or not plan.job.requeue or marker.result is Result.COMPLETED:
        return False
    lost = lost_nodes(marker, nodes)
    if not lost:
        return False
    is_single, needed = plan.job.layout is JobLayout.SINGLE, plan.job.components[0].nodes
    first = marker.first_failure
    by_preflight = first is not None and first.worker == PREFLIGHT
    if not _has_got_on(marker, began_at) and not by_preflight:
        others = len(lost) < len(expand(nodes)) and is_single
        if not (others and can_leave_out(job.job_id, lost, needed)):
            logger.warning("not requeued lost=%s reason=it completed no step", ",".join(lost))
            return False
    if is_single:
        leave_out(job.job_id, lost, needed, identity=job)
    return True


def _is_by_a_user(by: str) -> bool:
    """Whether a stop request of that name is a user's (`realsys stop`); empty: there is none."""
    return bool(by) and not by.startswith("Slurm (")


def _is_stopped_by_user(marker: ExitMarker, supervisor: Supervisor, job: JobPlan) -> bool:
    """Returns whether a user stopped it, not Slurm: a SIGTERM may be a preemption, after which Slurm
    requeues it."""
    by = supervisor.stop_watch.requested_by
    if marker.result is not Result.STOPPED or (job.requeue and by.startswith("Slurm (")):
        return False
    return is_cancelled(by)


def make_steps(
    plan: LaunchPlan,
    plan_hash: str,
    files: TrialFiles,
    attempt_files: AttemptFiles,
    board: ComponentBoard,
) -> Steps:
    """Returns how this attempt's workers are started. Opens the board if there are other jobs."""
    if plan.job is None:
        return LocalSteps(plan, plan_hash, attempt_files)
    nodes = component_nodes(plan.job, dict(os.environ))
    steps = SlurmSteps(plan, plan_hash, attempt_files, dict(enumerate(nodes)))
    if plan.job.layout is not JobLayout.SPLIT:
        return steps
    return SplitSteps(plan, files, attempt_files, board.open(), steps)


def _run(
    supervisor: Supervisor, attempt_files: AttemptFiles, plan: LaunchPlan, number: int
) -> ExitMarker:
    """Runs the supervisor and returns its marker, also if the supervisor itself fails: every attempt has
    one."""
    try:
        return supervisor.run()
    except Exception as error:  # outermost frame: told in the marker, with the traceback in the log
        logger.exception("supervisor failed")
        return ExitMarker(
            result=Result.FAILED,
            attempt=number,
            ended_at=time.time(),
            phase=plan.phases[-1].name,
            first_failure=failure_of("supervisor", error, log=str(attempt_files.log("supervisor"))),
            resume=f"realsys resume {plan.trial}",
        )


def _write_artifacts(files: TrialFiles) -> None:
    """Writes report and pictures in a separate process: drawing must not affect the run's result."""
    argv = [sys.executable, "-P", "-m", "realsys.observability.report.artifacts", str(files.root)]
    try:
        subprocess.run(argv, check=True, timeout=ARTIFACTS_TIMEOUT_S, capture_output=True)
    except (subprocess.SubprocessError, OSError) as error:
        detail = getattr(error, "stderr", b"") or b""
        logger.warning("report and pictures not written error=%s %s", error, detail.decode()[-500:])


def log_to(path: Path, worker: str) -> None:
    """Redirects the output of this process and its children to ``path``."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    configure_logging(worker)
