"""Handles signals that ask an attempt to end, and requeues the job afterwards.

On Slurm the supervisor is the batch script: ``--signal=B:USR2@grace`` and the SIGTERM of scancel,
preemption and the time limit reach it. It turns them into a stop request; the master finishes its step,
saves, and exits. If the plan says requeue, a run that Slurm interrupted asks Slurm to requeue its job,
and the next incarnation resumes.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from types import FrameType

from realsys.api.plan import LaunchPlan
from realsys.slurm.no_answer import NO_CONTROLLER
from realsys.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

LOCAL_GRACE_S = 60.0
TERM_GRACE_S = 20.0  # Slurm sends SIGKILL KillWait (30 s by default) after SIGTERM
SAVE_MARGIN_S = 10.0  # of the announced time: for the exit marker and the requeue
CANCEL_TIMEOUT_S = 20.0
_ANNOUNCED = ("Slurm (time limit)", "Slurm (preemption)")
_ANNOUNCED_UNKNOWN = "Slurm (SIGUSR2: time limit or preemption)"
REQUEUE_TIMEOUT_S = 20.0  # of one scontrol
REQUEUE_AGAIN_S = 2.0
REQUEUE_PATIENCE_S = 600.0  # Slurm ends the job earlier if its time is over
ENDED_IN_S = 60.0  # Slurm ends a requeued job within this time


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


def requeue_job(job_id: str) -> bool:
    """Requeues the job, retrying while the controller is unavailable; Slurm ends this process meanwhile.
    Returns False if Slurm refuses.

    If the site forbids it, the log says so; `realsys resume` still works.
    """
    argv = ["scontrol", "requeue", job_id]
    logger.info("requeue requested job=%s", job_id)
    deadline = time.monotonic() + REQUEUE_PATIENCE_S
    while True:
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=REQUEUE_TIMEOUT_S, check=False
            )
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


def cancel_job(job_id: str) -> None:
    """Makes Slurm report a job stopped by a user as CANCELLED, not FAILED.

    Slurm sends SIGTERM to this process, which exits by itself. Jobs that depend on its success do not
    start.
    """
    try:
        done = subprocess.run(
            ["scancel", job_id],
            capture_output=True,
            text=True,
            timeout=CANCEL_TIMEOUT_S,
            check=False,
        )
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
