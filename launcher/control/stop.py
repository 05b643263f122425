"""Ends a trial and proves that nothing of it is left.

First the polite way: a stop request that the master honours after its current step. When the
supervisor does not answer, or has died, the processes of the trial on this host are ended by
(pid, start): those recorded, and those whose environment names the trial. Every action is told.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from launcher.control.stop_job import stop_job
from launcher.control.stop_request import POLL_S, ask_to_stop, await_end
from launcher.trials.copies import refuse_copy
from launcher.trials.liveness import Liveness, Process, end_processes, processes_of
from launcher.trials.status import TrialReader
from launcher.trials.submission import read_submission, that_counts
from launcher.trials.trial_state import State
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ClusterError, TrialError
from realsys.trial.folders import check_ours
from realsys.trial.records import AttemptRecord, TrialFiles

EXTRA_S = 10.0  # after the grace: for the supervisor's own way of ending its workers
QUIET_S = 30.0  # after its exit marker: for the report page and submitit's result
TERM_S = 5.0


@dataclass
class StopReport:
    """What was done. ``was_over``: nothing ran in the first place."""

    view: TrialView
    was_over: bool = False
    actions: list[str] = field(default_factory=list)


def stop(
    files: TrialFiles,
    *,
    grace_s: float,
    tell: Callable[[str], None] = lambda text: None,
    extra_s: float = EXTRA_S,
    term_s: float = TERM_S,
) -> StopReport:
    """Returns when no process of the trial is left.

    Args:
        grace_s: how long the current step may take to finish.
        tell: gets each action as it is taken.
        extra_s: after the grace, how long the supervisor may take to end its workers.
        term_s: how long SIGTERM may take before SIGKILL.
    Raises:
        TrialError: the trial runs on another host; or the folder is a copy of another trial's.
        ClusterError: some process survived SIGKILL; or the trial's records are not ours, so that the
            processes which they name may be none of the trial's.
    """
    check_ours(files)
    refuse_copy(files, moved_too=False)
    with closing(TrialReader(files)) as reader:
        view = reader.view()
        report = StopReport(view)

        def did(text: str) -> None:
            report.actions.append(text)
            tell(text)

        submission = read_submission(files)
        if submission is not None and submission.on_slurm:
            submission = that_counts(submission, reader.records().attempt)
            report.was_over = not stop_job(reader, submission, view, grace_s, extra_s, did)
            report.view = reader.view()
            return report
        if view.state in State.live() and _is_elsewhere(view):
            ask_to_stop(reader, view, grace_s, did)
            await_end(reader, grace_s + extra_s)
            report.view = reader.view()
            _refuse_elsewhere(report.view)
            return report
        if view.state is State.UNKNOWN:
            _refuse_elsewhere(view)
        left = _left(files, reader)
        report.was_over = view.state not in State.live() and not left
        if report.was_over:
            return report
        if (view.state in State.live() and view.attempt) and (
            ask_to_stop(reader, view, grace_s, did) or _ask_by_signal(reader, did)
        ):
            await_end(reader, grace_s + extra_s)
        _await_quiet(files, reader, QUIET_S)
        _end_the_rest(files, reader, term_s, did)
        report.view = reader.view()
        return report


def _ask_by_signal(reader: TrialReader, did: Callable[[str], None]) -> bool:
    """SIGTERM to the supervisor alone, which takes it for a stop request; False when it is gone."""
    records = reader.records()
    if records.attempt is None or records.supervisor is not Liveness.ALIVE:
        return False
    pid = records.attempt.supervisor_pid
    if not Process(pid, records.attempt.supervisor_start).send(signal.SIGTERM):
        return False
    did(f"asked the supervisor (pid {pid}) by SIGTERM to stop after its current step")
    return True


def _await_quiet(files: TrialFiles, reader: TrialReader, timeout_s: float) -> None:
    """After an exit marker the supervisor still has a report to write and a job to return from."""
    view = reader.view()
    if view.exit is None:
        return
    deadline = time.monotonic() + timeout_s
    while _left(files, reader) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _end_the_rest(
    files: TrialFiles, reader: TrialReader, term_s: float, did: Callable[[str], None]
) -> None:
    termed, killed, left = end_processes(lambda: _left(files, reader), term_s=term_s)
    if termed:
        did(f"sent SIGTERM to pid {_pids(termed)}")
    if killed:
        did(f"sent SIGKILL to pid {_pids(killed)}")
    if left:
        raise ClusterError(
            f"pid {_pids(left)} is still there after SIGKILL",
            where=f"{files.root} on {socket.gethostname()}",
            fix="it hangs in the kernel (a dead file system or driver): ask the administrator",
        )
    did("no process of the trial is left")


def _left(files: TrialFiles, reader: TrialReader) -> list[Process]:
    """Processes of the trial on this host: by its records and by their environment."""
    recorded: set[Process] = set()
    records = reader.records()
    for worker in records.workers.values():
        if records.alive.get(worker.worker) is Liveness.ALIVE:
            recorded.add(Process(worker.pid, worker.start))
    if isinstance(records.attempt, AttemptRecord) and records.supervisor is Liveness.ALIVE:
        recorded.add(Process(records.attempt.supervisor_pid, records.attempt.supervisor_start))
    submission = read_submission(files)
    if submission is not None and submission.host == socket.gethostname():
        recorded.add(Process(submission.pid, submission.start))
    found = recorded | set(processes_of(files.root))
    return sorted((p for p in found if p.is_alive()), key=lambda p: p.pid)


def _is_elsewhere(view: TrialView) -> bool:
    return bool(view.host) and view.host != socket.gethostname()


def _refuse_elsewhere(view: TrialView) -> None:
    """Raises if the trial may still run on a host whose processes can't be seen from here."""
    if not _is_elsewhere(view) or view.state in State.final():
        return
    raise TrialError(
        f"{view.trial} is {view.state.value} on {view.host}; its processes can't be seen from here",
        where=socket.gethostname(),
        fix=f"run `realsys stop {view.trial}` on {view.host}",
    )


def _pids(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
