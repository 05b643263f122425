"""Stops a trial and verifies that none of its processes is left.

First gracefully: a stop request that the master honours after its current step. If the supervisor does
not answer or has died, the trial's processes on this host are ended by (pid, start): the recorded ones,
and those whose environment names the trial. Every action is reported.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from launcher.control.stop_job import stop_job
from launcher.control.stop_request import POLL_S, request_stop, wait_for_end
from launcher.trials.copies import refuse_copy
from launcher.trials.status import StatusReader
from launcher.trials.submission import effective_submission, read_submission
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ClusterError, TrialError
from realsys.trial.folders import check_ours
from realsys.trial.liveness import Liveness, Process, end_processes, processes_of
from realsys.trial.records import AttemptRecord, TrialFiles
from realsys.trial.trial_state import State

EXTRA_S = 10.0  # after the grace: for the supervisor to end its workers
QUIET_S = 30.0  # after its exit marker: for the report page and submitit's result
TERM_S = 5.0


@dataclass
class StopReport:
    """The actions taken. ``was_over``: nothing ran in the first place."""

    view: TrialView
    was_over: bool = False
    actions: list[str] = field(default_factory=list)


def stop(
    files: TrialFiles,
    *,
    grace_s: float,
    on_action: Callable[[str], None] = lambda text: None,
    extra_s: float = EXTRA_S,
    term_s: float = TERM_S,
) -> StopReport:
    """Stops the trial; returns when none of its processes is left.

    Args:
        grace_s: time for the current step to finish.
        on_action: called with each action as it is taken.
        extra_s: after the grace, time for the supervisor to end its workers.
        term_s: time between SIGTERM and SIGKILL.
    Raises:
        TrialError: the trial runs on another host; or the folder is a copy of another trial's.
        ClusterError: a process survived SIGKILL; or the trial's records are another user's, so the
            processes that they name may not be the trial's.
    """
    check_ours(files)
    refuse_copy(files, moved_too=False)
    with closing(StatusReader(files)) as reader:
        view = reader.view()
        report = StopReport(view)

        def record_action(text: str) -> None:
            report.actions.append(text)
            on_action(text)

        submission = read_submission(files)
        if submission is not None and submission.on_slurm:
            submission = effective_submission(submission, reader.records().attempt)
            report.was_over = not stop_job(
                reader, submission, view, grace_s, extra_s, record_action
            )
            report.view = reader.view()
            return report
        if view.state in State.live() and _is_elsewhere(view):
            request_stop(reader, view, grace_s, record_action)
            wait_for_end(reader, grace_s + extra_s)
            report.view = reader.view()
            _refuse_elsewhere(report.view)
            return report
        if view.state is State.UNKNOWN:
            _refuse_elsewhere(view)
        left = _remaining_processes(files, reader)
        report.was_over = view.state not in State.live() and not left
        if report.was_over:
            return report
        if (view.state in State.live() and view.attempt) and (
            request_stop(reader, view, grace_s, record_action)
            or _request_stop_by_signal(reader, record_action)
        ):
            wait_for_end(reader, grace_s + extra_s)
        _wait_for_exit(files, reader, QUIET_S)
        _end_remaining(files, reader, term_s, record_action)
        report.view = reader.view()
        return report


def _request_stop_by_signal(reader: StatusReader, record_action: Callable[[str], None]) -> bool:
    """Sends SIGTERM to the supervisor alone, which handles it as a stop request; False if it has ended."""
    records = reader.records()
    if records.attempt is None or records.supervisor is not Liveness.ALIVE:
        return False
    pid = records.attempt.supervisor_pid
    if not Process(pid, records.attempt.supervisor_start).send(signal.SIGTERM):
        return False
    record_action(
        f"requested a stop after the current step by SIGTERM to the supervisor (pid {pid})"
    )
    return True


def _wait_for_exit(files: TrialFiles, reader: StatusReader, timeout_s: float) -> None:
    """Waits, after an exit marker, until the supervisor has written its report and exited."""
    view = reader.view()
    if view.exit is None:
        return
    deadline = time.monotonic() + timeout_s
    while _remaining_processes(files, reader) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _end_remaining(
    files: TrialFiles, reader: StatusReader, term_s: float, record_action: Callable[[str], None]
) -> None:
    termed, killed, left = end_processes(lambda: _remaining_processes(files, reader), term_s=term_s)
    if termed:
        record_action(f"sent SIGTERM to pid {_pids(termed)}")
    if killed:
        record_action(f"sent SIGKILL to pid {_pids(killed)}")
    if left:
        raise ClusterError(
            f"pid {_pids(left)} still runs after SIGKILL",
            where=f"{files.root} on {socket.gethostname()}",
            fix="it hangs in the kernel (a dead file system or driver): ask the administrator",
        )
    record_action("no process of the trial is left")


def _remaining_processes(files: TrialFiles, reader: StatusReader) -> list[Process]:
    """Lists processes of the trial on this host: by its records and by their environment."""
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
    """Raises TrialError if the trial may still run on a host whose processes are not visible here."""
    if not _is_elsewhere(view) or view.state in State.final():
        return
    raise TrialError(
        f"{view.trial} is {view.state.value} on {view.host}; its processes can't be seen from here",
        where=socket.gethostname(),
        fix=f"run `realsys stop {view.trial}` on {view.host}",
    )


def _pids(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
