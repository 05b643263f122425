"""The parent of one worker, which srun starts for each task: ``python -m realsys.worker.srun_task TYPE …``.

Determines which task of the group it is (SLURM_PROCID, counted from --first-index), gives the worker its
environment and its GPUs, starts it, and records how it ended: a worker killed by a signal can't do that
itself, and srun passes only a code to the supervisor. It computes nothing and holds no socket. It kills a
worker of an independently restartable type when the supervisor requests it by a file: a signal sent
through Slurm would reach all tasks of the step.

SIGTERM is ignored here and in the worker: Slurm sends it to every process of a step when the job is
cancelled, preempted or out of time, and also to the batch process, the supervisor. That one asks the
master to save and exit; remaining workers are killed when the grace period is over.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from realsys.api.errors import ClusterError, RealsysError
from realsys.api.plan import LaunchPlan, StepPlan, read_plan
from realsys.api.scheduling import INDEPENDENTLY_RESTARTABLE
from realsys.name_resolve.file.commit_log import NFS, file_system_of
from realsys.runtime import worker_exit_codes
from realsys.runtime.child_processes.parent_death import (
    PARENT_PID_VARIABLE,
    adopt_orphans,
    wait_for_children,
)
from realsys.runtime.failures import failure_of
from realsys.runtime.linux import pidfd_open
from realsys.runtime.oom_evidence import oom_evidence, read_oom_counts
from realsys.slurm.gpus import own_devices
from realsys.trial.folders import restrict_umask
from realsys.trial.records import (
    TrialFiles,
    WorkerExit,
    is_there,
    read_record,
    write_record,
)
from realsys.worker.environment import gpu_variables, task_environment
from realsys.worker.main import command
from realsys.worker.network import interface_variables
from realsys.worker.requeued import linger, newer_attempt_of_same_job
from realsys.worker.task_place import TaskPlace, devices_at, keep_to_cpus, place_of_task

# Slurm kills the rest of a step when its tasks have ended: by then the worker's heartbeat process (which
# takes three seconds at most) must have deregistered the worker.
HEARTBEAT_ENDS_IN_S = 4.0
LOOK_S = 2.0  # interval of checking for the file that requests a worker's end


def main() -> int:
    """Runs one worker as a child; returns its exit code, or 128 + signal if a signal ended it."""
    args = _parse()
    restrict_umask()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    index = args.first_index + int(os.environ["SLURM_PROCID"])
    worker = f"{args.worker_type}/{index}"
    files = TrialFiles(Path(args.trial_dir))
    attempt = files.attempt(args.attempt)
    memory = read_oom_counts()
    adopt_orphans()
    try:
        child = _start(args, index)
    except RealsysError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - there is no logger yet
        write_record(attempt.failure_record(worker), failure_of(worker, error))
        return worker_exit_codes.FAILED
    code = _wait(child, attempt.end_of(worker, args.phase, args.restart), args.worker_type)
    ended = WorkerExit(
        worker=worker,
        host=socket.gethostname(),
        pid=child.pid,
        returncode=code,
        at=time.time(),
        hint=oom_evidence(memory, read_oom_counts()) if code == -signal.SIGKILL else "",
    )
    try:
        write_record(attempt.exit_of(worker), ended)
    except OSError as error:
        print(f"exit record of {worker} not written: {error}", file=sys.stderr)  # noqa: T201
    wait_for_children(HEARTBEAT_ENDS_IN_S)
    if newer_attempt_of_same_job(files, args.attempt) is not None:
        print(f"{worker} has ended; its job was requeued, waiting for Slurm to end this task")  # noqa: T201
        sys.stdout.flush()
        linger()
    return code if code >= 0 else 128 - code


def _start(args: argparse.Namespace, index: int) -> subprocess.Popen[bytes]:
    files = TrialFiles(Path(args.trial_dir))
    plan = read_plan(files.plan, expected_hash=args.plan_hash)
    phase = plan.phase(args.phase)
    (step,) = [s for s in phase.steps if s.worker_type == args.worker_type]
    argv = command(
        trial_dir=args.trial_dir,
        plan_hash=args.plan_hash,
        phase=args.phase,
        attempt=args.attempt,
        worker_type=args.worker_type,
        index=index,
        like=args.like,
    )
    environment = {
        **task_environment(plan, os.environ, args.worker_type),
        **step.env_vars,
        **_gpus(step, args, files.attempt(args.attempt).place_of(f"{args.worker_type}/{index}")),
        PARENT_PID_VARIABLE: str(os.getpid()),
    }
    environment |= gpu_variables(phase, args.worker_type, environment)
    environment.update(_interface(plan, files, args.attempt, environment))
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment)


def _wait(child: subprocess.Popen[bytes], end: Path, worker_type: str) -> int:
    """Waits for the child and returns its code. Kills it as soon as the file ``end`` exists."""
    if worker_type in INDEPENDENTLY_RESTARTABLE:
        poll = select.poll()
        poll.register(pidfd_open(child.pid), select.POLLIN)
        look = is_there if file_system_of(end.parent) in NFS else Path.exists
        while not poll.poll(LOOK_S * 1000) and not look(end):
            pass
        child.kill()  # no effect if it has ended
    return child.wait()


def _gpus(step: StepPlan, args: argparse.Namespace, recorded: Path) -> dict[str, str]:
    """Returns the task's own devices. For a restartable worker they are recorded, with its CPUs, and used
    again at a restart."""
    if args.restart:
        place = read_record(TaskPlace, recorded)
        if place is None:
            raise ClusterError(
                "the node place of this worker's first start is unknown",
                where=str(recorded),
                fix="resume the trial; its folder must be visible on every node",
            )
        keep_to_cpus(place)
        return {"CUDA_VISIBLE_DEVICES": devices_at(place, os.environ)}
    found = _own_gpus(step)
    if args.worker_type in INDEPENDENTLY_RESTARTABLE:
        visible = {**os.environ, **found}.get("CUDA_VISIBLE_DEVICES", "")
        write_record(recorded, place_of_task(step, visible, os.environ))
    return found


def _own_gpus(step: StepPlan) -> dict[str, str]:
    """Returns the task's own devices; Slurm's value is already correct if Slurm does the binding."""
    if step.gpu_binding != "visible":
        return {} if step.gpus_per_task else {"CUDA_VISIBLE_DEVICES": ""}
    local = os.environ.get("SLURM_LOCALID")
    if local is None:
        raise ClusterError(
            "SLURM_LOCALID is not set",
            where=socket.gethostname(),
            fix="the container runtime must pass Slurm's variables on; check with `realsys doctor`",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = own_devices(visible, int(local), step.gpus_per_task)
    return {"CUDA_VISIBLE_DEVICES": own}


def _interface(
    plan: LaunchPlan, files: TrialFiles, attempt: int, environment: dict[str, str]
) -> dict[str, str]:
    found = interface_variables(plan.cluster, files.attempt(attempt))
    return {name: value for name, value in found.items() if name not in environment}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worker_type")
    parser.add_argument("--trial-dir", required=True)
    parser.add_argument("--plan-hash", required=True)
    parser.add_argument("--phase", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--first-index", type=int, default=0, help="of the step's workers")
    parser.add_argument("--restart", type=int, default=0, help="how often it was restarted")
    parser.add_argument(
        "--like", type=int, help="the planned worker with an added one's configuration"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
