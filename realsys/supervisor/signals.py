"""Handles signals that ask an attempt to end, and requeues the job afterwards, on other nodes if it lost
some.

On Slurm the supervisor is the batch script: ``--signal=B:USR2@grace`` and the SIGTERM of scancel,
preemption and the time limit reach it. It turns them into a stop request; the master finishes its step,
saves, and exits. If the plan says requeue, a run that Slurm interrupted asks Slurm to requeue its job,
and the next incarnation resumes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from types import FrameType

from realsys.api.errors import ConfigError
from realsys.api.plan import LaunchPlan
from realsys.slurm.job_identity import JobIdentity, Ownership
from realsys.slurm.lost_nodes import evidence, without_lost
from realsys.slurm.no_answer import NO_CONTROLLER
from realsys.supervisor.own_jobs import ownerships
from realsys.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

LOCAL_GRACE_S = 60.0
TERM_GRACE_S = 20.0  # Slurm sends SIGKILL KillWait (30 s by default) after SIGTERM
SAVE_MARGIN_S = 10.0  # of the announced time: for the exit marker and the requeue
CANCEL_TIMEOUT_S = 20.0
_ANNOUNCED = ("Slurm (time limit)", "Slurm (preemption)")
_ANNOUNCED_UNKNOWN = "Slurm (SIGUSR2: time limit or preemption)"
REQUEUE_TIMEOUT_S = 20.0  # of one scontrol
REQUEUE_ASK_S = 3.0  # for whose the job is; Slurm may leave 10 s for all of it
REQUEUE_AGAIN_S = 2.0
REQUEUE_PATIENCE_S = 600.0  # Slurm ends the job earlier if its time is over
ENDED_IN_S = 60.0  # Slurm ends a requeued job within this time
TRY_FOR_S = 25.0  # to have lost nodes left out; KillWait is 30 s by default
TRY_EVERY_S = 0.5
ANSWER_S = 10.0


def listen_to_signals(supervisor: Supervisor, plan: LaunchPlan) -> threading.Event:
    """Installs the handlers; the event is set when the job should be requeued after the stop."""
    requeue = threading.Event()
    on_slurm = plan.job is not None
    announced = plan.cluster.slurm.grace_seconds

    def on_signal(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not on_slurm:
            supervisor.request_stop(name, grace_s=LOCAL_GRACE_S)
        elif number == signal.SIGUSR2:
            grace_s = max(5.0, announced - SAVE_MARGIN_S)
            by = _interruption(os.environ, announced)
            is_first = supervisor.request_stop(by, grace_s=grace_s)
            if is_first and plan.job is not None and plan.job.requeue:
                requeue.set()  # not after an earlier stop request, which is meant to be final
        else:
            supervisor.request_stop(f"Slurm ({name}: cancelled or preempted)", grace_s=TERM_GRACE_S)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, on_signal)
    return requeue


def requeue_job(job_id: str, identity: JobIdentity | None = None) -> bool:
    """Requeues the job, retrying while the controller is unavailable; Slurm ends this process meanwhile.
    Returns False if Slurm refuses, or has another job of that id by now.

    If the site forbids it, the log says so; `realsys resume` still works.

    Args:
        identity: what the job is recognised by; None: it is not asked.
    """
    logger.info("requeue requested job=%s", job_id)
    deadline = time.monotonic() + REQUEUE_PATIENCE_S
    if identity is not None and _is_anothers(identity, timeout_s=REQUEUE_ASK_S):
        logger.error("requeue given up job=%s error=Slurm has no such job of the trial", job_id)
        return False
    while True:
        try:
            done = _run("scontrol", "requeue", job_id, timeout_s=REQUEUE_TIMEOUT_S)
        except FileNotFoundError as error:
            logger.error("requeue failed job=%s error=%s", job_id, error)
            return False
        except (OSError, subprocess.TimeoutExpired) as error:
            why, is_answer = str(error), False
        else:
            if not done.returncode:
                break
            why, is_answer = done.stderr.strip(), not NO_CONTROLLER.search(done.stderr)
        if is_answer or time.monotonic() > deadline:
            logger.error("requeue refused job=%s error=%s", job_id, why)
            return False
        logger.warning("requeue not answered, retrying job=%s error=%s", job_id, why)
        time.sleep(REQUEUE_AGAIN_S)
    time.sleep(ENDED_IN_S)  # exiting first would end the job for good
    return True


def is_cancelled(by: str) -> bool:
    """Returns whether a stop requested by ``by`` was a user's decision (`realsys stop`, scancel), not an
    interruption announced by Slurm (SIGUSR2). Pure."""
    return by not in (*_ANNOUNCED, _ANNOUNCED_UNKNOWN)


def _is_anothers(identity: JobIdentity, *, timeout_s: float) -> bool:
    """Whether Slurm says that the id is not this job's any more; False if it does not say."""
    whose = (ownerships([identity], timeout_s=timeout_s) or {}).get(identity.job_id)
    return whose in (Ownership.NOT_OURS, Ownership.GONE)


def cancel_job(job_id: str, identity: JobIdentity | None = None) -> None:
    """Makes Slurm report a job stopped by a user as CANCELLED, not FAILED.

    Slurm sends SIGTERM to this process, which exits by itself. Jobs that depend on its success do not
    start.

    Args:
        identity: what the job is recognised by; nothing is cancelled that is not. None: it is not asked.
    """
    if identity is not None:
        whose = ownerships([identity], timeout_s=CANCEL_TIMEOUT_S)
        if whose is None or whose[job_id] is not Ownership.OURS:
            logger.warning("not cancelled job=%s", job_id)
            return
    try:
        done = _run("scancel", job_id, timeout_s=CANCEL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("cancellation failed job=%s error=%s", job_id, error)
        return
    if done.returncode:
        logger.warning("cancellation refused job=%s error=%s", job_id, done.stderr.strip())


def _interruption(environ: os._Environ[str], announced_s: float) -> str:
    """Returns the reason for SIGUSR2, as far as the job's end time shows it (SLURM_JOB_END_TIME, Slurm
    23.02)."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return _ANNOUNCED_UNKNOWN
    # Slurm sends it up to 60 s early (man sbatch, --signal).
    near_end = int(end) - time.time() < announced_s + 90
    return _ANNOUNCED[0] if near_end else _ANNOUNCED[1]


# ---- Makes the next start of a requeued job avoid the nodes it lost.
#
# Slurm accepts a new --exclude for the job itself only once it is on its way back to the queue; so the
# request is repeated in a thread, beside the requeue. Nothing here may keep an attempt from ending.


def can_leave_out(job_id: str, lost: Mapping[str, str], needed: int) -> bool:
    """Asks Slurm whether the job could start without the lost nodes; False if it does not answer.

    Args:
        lost, needed: as of leave_out.
    """
    try:
        return _wanted(job_id, lost, needed) is not None
    except (OSError, subprocess.TimeoutExpired, ConfigError, ValueError) as error:
        logger.warning("lost nodes not compared with others error=%s", error)
        return False


def leave_out(
    job_id: str, lost: Mapping[str, str], needed: int, *, identity: JobIdentity | None = None
) -> threading.Thread:
    """Starts asking Slurm to exclude the lost nodes from the job's next start, if it can.

    Args:
        lost: node → why (realsys/slurm/lost_nodes.py).
        needed: nodes of the job.
        identity: what the job is recognised by; None: it is not asked.
    """
    thread = threading.Thread(
        target=_leave_out, args=(job_id, lost, needed, identity), name="other nodes", daemon=True
    )
    thread.start()
    return thread


def _leave_out(
    job_id: str, lost: Mapping[str, str], needed: int, identity: JobIdentity | None
) -> None:
    try:
        if identity is not None and _is_anothers(identity, timeout_s=ANSWER_S):
            logger.warning("lost nodes not excluded error=Slurm has no such job of the trial")
            return
        wanted = _wanted(job_id, lost, needed)
        if wanted is None:
            logger.warning("lost nodes not excluded lost=%s reason=job needs them", evidence(lost))
            return
        deadline = time.monotonic() + TRY_FOR_S
        while True:
            done = _run("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={wanted}")
            if done.returncode == 0:
                logger.warning("lost nodes excluded lost=%s", evidence(lost))
                return
            if time.monotonic() > deadline:
                logger.warning("lost nodes not excluded error=%s", done.stderr.strip())
                return
            time.sleep(TRY_EVERY_S)
    except (OSError, subprocess.TimeoutExpired, ConfigError, ValueError) as error:
        logger.warning("lost nodes not excluded lost=%s error=%s", evidence(lost), error)


def _wanted(job_id: str, lost: Mapping[str, str], needed: int) -> str | None:
    output = _run("scontrol", "show", "job", "--oneliner", job_id).stdout
    facts = dict(re.findall(r"(\w+)=(\S*)", output))
    excluded, pinned = (_list(facts.get(name, "")) for name in ("ExcNodeList", "ReqNodeList"))
    where = [f"--partition={facts['Partition']}"] if facts.get("Partition") else []
    sizes = _run("sinfo", "--noheader", "--format=%D", *where).stdout.split()
    return without_lost(
        lost, excluded=excluded, pinned=pinned, of_partition=sum(map(int, sizes)), needed=needed
    )


def _list(value: str) -> str:
    return "" if value == "(null)" else value


def _run(*argv: str, timeout_s: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
