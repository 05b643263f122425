"""Explains why workers ended or hang: one Failure per worker, from everything known about it.

For supervisor.py. Sources in order: the worker's own failure record, how its parent saw it end, what its
launcher reported (srun, the kernel's count of memory kills), then its lease and its heartbeat process.
first_failure.py decides which of several failures was first.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from realsys.runtime import worker_exit_codes
from realsys.runtime.oom_evidence import memory_fix
from realsys.slurm.srun_messages import what_to_do
from realsys.supervisor.health.first_failure import (
    describe_exit,
    log_tail,
    watchdog_words,
)
from realsys.supervisor.health.peer_failures import NCCL_ENDED_IT, STEP_CANCELLED
from realsys.supervisor.steps.steps import StepTask
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    Failure,
    WorkerRecord,
    WorkerStatus,
    read_record,
)

STALLED = "Stalled"
# Of slurmstepd, in the logs of the step's tasks on all of its nodes
_CANCELLED = re.compile(r"\*\*\* ((?:STEP|JOB) \S+ ON \S+ CANCELLED AT [^*]*\S) *\*\*\*")
LEASE_ENDED = "its lease has ended: its node is lost or cut off, or it hangs"
WATCHDOG_LINES = 200  # its message precedes a page of C++ frames
# What the main thread's innermost frames look like while a rank waits for its peers.
_WAITS = ("distributed", "process_group", "all_reduce", "all_gather", "broadcast", "barrier")


@dataclass(frozen=True)
class FailureReporter:
    """Writes Failures for one attempt."""

    attempt: AttemptRecord
    files: AttemptFiles

    def of_task(self, task: StepTask, known: WorkerRecord | None) -> Failure:
        """Reports a worker that has ended, or whose lease has."""
        failure = read_record(Failure, self.files.failure_record(task.worker))
        if failure is None:
            fix = what_to_do(task.hint) or self._memory_fix(task)
            failure = _unfinished(self._why(task), at=task.ended_at or time.time(), fix=fix)
        return self._completed(failure, task, known)

    def of_silence(self, task: StepTask, known: WorkerRecord | None, *, why: str) -> Failure:
        """Reports a worker whose node can't be reached."""
        at = task.ended_at or time.time()
        return self._completed(_unfinished(why, at=at, fix=""), task, known)

    def _why(self, task: StepTask) -> str:
        why = _why(task)
        if task.poll() in (-signal.SIGKILL, -signal.SIGTERM) and (log := self._log_of(task.worker)):
            cancelled = _CANCELLED.search("\n".join(log_tail(log)))
            why = f"{STEP_CANCELLED}: {cancelled[1]}" if cancelled else why
        if task.poll() == -signal.SIGABRT and (log := self._log_of(task.worker)):
            message = watchdog_words(log_tail(log, lines=WATCHDOG_LINES))
            why += f": {NCCL_ENDED_IT}: {message}" if message else ""
        return why

    def _memory_fix(self, task: StepTask) -> str:
        worker_type = task.worker.partition("/")[0]
        trial = "/".join(self.files.root.parts[-4:-2])
        return memory_fix(task.hint, worker_type, on_slurm=bool(self.attempt.nodes), trial=trial)

    def of_stall(self, task: StepTask, known: WorkerRecord | None, status: WorkerStatus) -> Failure:
        """Reports a worker that is alive but makes no progress."""
        fix = f"stacks of all workers: {self.files.stacks}"
        why = "does not answer: other workers wait for it without progress"
        if status.stalled_s:
            doing = f" in {status.mfc}" if status.mfc else ""
            where = f", {status.stalled_where}" if status.stalled_where else ""
            why = f"stalled: no progress for {status.stalled_s:.0f} s{doing} of step {status.step}{where}"
            fix += "; a step may really take this long: raise REALSYS_STALL_FLOOR_S"
        failure = _unfinished(why, at=time.time() - status.stalled_s, kind=STALLED, fix=fix)
        return self._completed(failure, task, known)

    def _completed(self, failure: Failure, task: StepTask, known: WorkerRecord | None) -> Failure:
        """Adds who it was, where, and the end of its log."""
        log = self._log_of(task.worker)
        return replace(
            failure,
            worker=task.worker,
            host=task.host or (known.host if known else "") or self.attempt.host,
            pid=task.pid or (known.pid if known else 0),
            log=str(log or ""),
            log_tail=log_tail(log) if log else (),
        )

    def _log_of(self, worker: str) -> Path | None:
        """Returns the worker's own log; that of its srun if it never started; else None."""
        kind, _, index = worker.partition("/")
        of_srun = [self.files.logs / f"srun-{kind}.log"]
        of_srun += sorted(self.files.logs.glob(f"srun-{kind}-{index}-*.log"), reverse=True)
        found = (log for log in (self.files.log(worker), *of_srun) if log.exists())
        return next(found, None)


def _unfinished(why: str, *, at: float, fix: str, kind: str = "") -> Failure:
    return Failure(worker="", host="", pid=0, why=why, at=at, kind=kind, fix=fix)


def suspects(statuses: Mapping[str, WorkerStatus]) -> Sequence[str]:
    """Returns the stalled workers that do not merely wait for another one. Pure.

    One hanging rank blocks all that share a collective with it: those wait in the collective, or for a
    peer's tensors, and publish it. A worker that waits for a peer points to that peer. If all wait in
    collectives, all are returned.
    """
    stalled = {worker: status for worker, status in statuses.items() if status.stalled_s > 0}
    ends = {_end_of_chain(worker, statuses) for worker in stalled}
    own = [w for w in ends if w not in stalled or not is_in_collective(stalled[w])]
    found = own or list(stalled)
    return sorted(found, key=lambda worker: (-statuses[worker].stalled_s, worker))


def _end_of_chain(worker: str, statuses: Mapping[str, WorkerStatus]) -> str:
    seen = {worker}
    while (other := statuses[worker].waits_for.partition(": ")[0]) in statuses:
        if other in seen:
            return worker
        seen.add(other)
        worker = other
    return worker


def is_in_collective(status: WorkerStatus) -> bool:
    """Returns whether the worker's stack shows that it waits for its peers in a collective."""
    where = status.stalled_where.lower()
    return any(word in where for word in _WAITS)


def _why(task: StepTask) -> str:
    returncode = task.poll()
    if returncode is None:
        return LEASE_ENDED
    if returncode == worker_exit_codes.NOT_STARTED:
        return f"was not started: {task.hint}"
    if returncode == worker_exit_codes.DONE:
        return "ended with exit code 0 before its work was done: code in it, or in a library, exits"
    return describe_exit(returncode) + (f" ({task.hint})" if task.hint else "")
