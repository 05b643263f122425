"""Stops a trial and verifies that none of its processes is left.

First gracefully: a stop request that the master honours after its current step. If the supervisor does
not answer or has died, the trial's processes on this host are ended by (pid, start): the recorded ones,
and those whose environment names the trial. Every action is reported.

On Slurm, from any node with access to it: a pending job is cancelled. A running one gets the stop request,
through Slurm if its store does not answer; what remains after the grace is killed in its steps and its
batch script at once, since tasks ignore the SIGTERM of a plain scancel (realsys/worker/srun_task.py). It
has ended when Slurm says so: a job is no longer COMPLETING once slurmd has confirmed the end of every
process. Before each scancel Slurm is asked whether the ids are still the trial's jobs.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field

from launcher.sites.places import user_name
from launcher.slurm.slurm_commands import scancel
from launcher.terminal.text import listed
from launcher.trials.await_end import views_until_over
from launcher.trials.copies import refuse_copy
from launcher.trials.job_board import JobBoard
from launcher.trials.status import StatusReader
from launcher.trials.submission import (
    Submission,
    effective_submission,
    read_submission,
    record_cancellation,
)
from launcher.trials.trial_view import ASSUME_ENDED, TrialView
from realsys.api.errors import ClusterError, RealsysError, TrialError
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.trial_store import open_trial_store
from realsys.trial.folders import check_ours
from realsys.trial.liveness import Liveness, Process, end_processes, processes_of
from realsys.trial.machine_identity import Whereabouts, whereabouts
from realsys.trial.records import StopRequest, TrialFiles, dumps
from realsys.trial.trial_state import JobState, State

EXTRA_S = 10.0  # after the grace: for the supervisor to end its workers
QUIET_S = 30.0  # after its exit marker: for the report page and submitit's result
TERM_S = 5.0
POLL_S = 0.1
MOST_PLACES = 8  # of processes, in an error
GONE_S = 40.0  # KillWait is 30 s by default
POLL_PAUSES_S = (0.3, 0.5, 1.0, 2.0)  # of Slurm; the last one repeatedly


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
        ClusterError: a process survived SIGKILL, or a job its own; Slurm does not answer; or the trial's
            records are another user's, so the processes that they name may not be the trial's.
    """
    check_ours(files)
    refuse_copy(files, moved_too=False)
    with closing(StatusReader(files)) as reader:
        report = StopReport(reader.view())

        def act(text: str) -> None:
            report.actions.append(text)
            on_action(text)

        ending = _Ending(reader, report.view, grace_s, extra_s, term_s, act)
        submission = read_submission(files)
        if submission is not None and submission.on_slurm:
            attempt = reader.records().attempt
            report.was_over = not ending.end_job(effective_submission(submission, attempt))
        else:
            report.was_over = not ending.end_here()
        report.view = reader.view()
        return report


@dataclass(frozen=True)
class _Ending:
    """Ends what runs of one trial; each of its two ways returns False if nothing ran."""

    reader: StatusReader
    view: TrialView  # at the beginning
    grace_s: float
    extra_s: float
    term_s: float
    act: Callable[[str], None]  # records an action

    # ---- on this machine --------------------------------------------------------------------

    def end_here(self) -> bool:
        """Ends the trial's processes on this host, or requests a stop from its supervisor elsewhere."""
        view = self.view
        if view.state in State.live() and self._is_elsewhere():
            self._request_stop()
            self._wait_for_end()
            self._refuse_elsewhere(self.reader.view())
            return True
        if view.state is State.UNKNOWN:
            self._refuse_elsewhere(view)
        if view.state not in State.live() and not self._remaining_processes():
            return False
        if (view.state in State.live() and view.attempt) and (
            self._request_stop() or self._request_stop_by_signal()
        ):
            self._wait_for_end()
        self._wait_for_exit()
        self._end_remaining()
        return True

    def _request_stop(self) -> bool:
        """Writes the stop request. False if the store can't be written."""
        plan, number = self.reader.plan, self.view.attempt
        if plan is None:
            return False
        by = f"{user_name()}@{socket.gethostname()}"
        request = StopRequest(grace_seconds=self.grace_s, by=by, at=time.time(), attempt=number)
        try:
            with closing(open_trial_store(plan, self.reader.files.attempt(number))) as store:
                store.add(TrialKeys.of(plan).stop, dumps(request), replace=True)
        except RealsysError as error:
            self.act(f"the stop request failed: {error.what}")
            return False
        self.act(
            f"requested a stop of attempt {number} after its current step (up to {self.grace_s:g} s)"
        )
        return True

    def _request_stop_by_signal(self) -> bool:
        """Sends SIGTERM to the supervisor alone, which handles it as a stop request; False if it has
        ended.
        """
        records = self.reader.records()
        if records.attempt is None or records.supervisor is not Liveness.ALIVE:
            return False
        pid = records.attempt.supervisor_pid
        if not Process(pid, records.attempt.supervisor_start).send(signal.SIGTERM):
            return False
        self.act(
            f"requested a stop after the current step by SIGTERM to the supervisor (pid {pid})"
        )
        return True

    def _wait_for_end(self) -> bool:
        """Waits until the attempt has ended; False if it has not after the grace and ``extra_s``."""
        timeout_s = self.grace_s + self.extra_s
        views = views_until_over(self.reader, brief=True, timeout_s=timeout_s, pause_s=POLL_S)
        return any(view.is_over for view in views)

    def _wait_for_exit(self) -> None:
        """Waits, after an exit marker, until the supervisor has written its report and exited."""
        if self.reader.view().exit is None:
            return
        deadline = time.monotonic() + QUIET_S
        while self._remaining_processes() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _end_remaining(self) -> None:
        termed, killed, left = end_processes(self._remaining_processes, term_s=self.term_s)
        if termed:
            self.act(f"sent SIGTERM to pid {_listed(termed)}")
        if killed:
            self.act(f"sent SIGKILL to pid {_listed(killed)}")
        if left:
            raise ClusterError(
                f"pid {_listed(left)} still runs after SIGKILL",
                where=f"{self.reader.files.root} on {socket.gethostname()}",
                fix="it hangs in the kernel (a dead file system or driver): ask the administrator",
            )
        self.act("no process of the trial is left")

    def _remaining_processes(self) -> list[Process]:
        """Lists processes of the trial on this host: by its records and by their environment."""
        records, files = self.reader.records(), self.reader.files
        found = set(processes_of(files.root))
        for worker in records.workers.values():
            if records.alive.get(worker.worker) is Liveness.ALIVE:
                found.add(Process(worker.pid, worker.start))
        if records.attempt is not None and records.supervisor is Liveness.ALIVE:
            found.add(Process(records.attempt.supervisor_pid, records.attempt.supervisor_start))
        submission = read_submission(files)
        if submission is not None and (
            whereabouts(submission.host, submission.machine) is Whereabouts.HERE
        ):
            found.add(Process(submission.pid, submission.start))
        return sorted((p for p in found if p.is_alive()), key=lambda p: p.pid)

    def _is_elsewhere(self) -> bool:
        started = self.reader.records().attempt or read_submission(self.reader.files)
        if started is None:
            return False
        return whereabouts(started.host, started.machine) is Whereabouts.ELSEWHERE

    def _refuse_elsewhere(self, view: TrialView) -> None:
        """Raises TrialError if the trial may still run where its processes are not visible from here."""
        if view.state in State.final() or not self._is_elsewhere():
            return
        ended = f"; if it has ended: {ASSUME_ENDED.format(view.trial)}"
        raise TrialError(
            f"{view.trial} is {view.state.value} on {view.host or 'another host'}; its processes can't be "
            "seen from here",
            where=socket.gethostname(),
            fix=f"run `realsys stop {view.trial}` on {view.host or 'that host'}"
            + (ended if view.state is State.UNKNOWN else ""),
        )

    # ---- on Slurm ---------------------------------------------------------------------------

    def end_job(self, job: Submission) -> bool:
        """Ends the jobs of the submission, of which the first holds the last attempt.

        Raises:
            ClusterError: Slurm does not answer, or a job remains after it was killed.
        """
        view, names = self.view, _listed(job.job_ids)
        if view.state not in State.live() and view.state is not State.UNKNOWN:
            if self._has_ended(job):
                return False
            self._await_gone(job, QUIET_S)
        elif view.state in (State.QUEUED, State.HELD) or view.attempt <= job.after_attempt:
            if not (waiting := self._cancellable(job)) and self._has_ended(job):
                return False
            scancel(waiting, cluster=job.cluster)
            self.act(f"cancelled job {names}, which had not started a run")
            record_cancellation(self.reader.files, job, by=user_name())
        else:
            if not self._request_stop():
                self._request_stop_by_slurm(job)
            if self._wait_for_end():
                self._await_gone(job, QUIET_S)
            self._refuse_if_unknown_to_slurm(job)
        if left := self._cancellable(job):
            self.act(f"killing job {_listed(left)}")
            scancel(left, signal="KILL", full=True, cluster=job.cluster)
            scancel(left, cluster=job.cluster)  # in case it is requeued
        if not self._await_gone(job, GONE_S):
            raise ClusterError(
                f"job {job.job_id} is still in Slurm {GONE_S:g} s after it was killed",
                where=f"squeue -j {job.job_id}",
                fix="a process hangs in the kernel of a node, or slurmd does not answer: ask the site",
            )
        self.act(f"job {names} has left Slurm; no process of the trial is left")
        return True

    def _request_stop_by_slurm(self, job: Submission) -> None:
        """Sends SIGTERM through Slurm to the supervisor alone, which handles it as a stop request.

        The supervisor passes it on over its own connection (realsys/supervisor/signals.py).
        """
        try:
            if job.job_id not in self._cancellable(job):
                self.act(f"Slurm knows no job {job.job_id} of the trial to pass a stop request on")
                return
            scancel([job.job_id], signal="TERM", cluster=job.cluster)
        except ClusterError as error:
            self.act(f"the stop request through Slurm failed too: {error.what}")
            return
        self.act(f"requested a stop after the current step from job {job.job_id} through Slurm")

    def _has_ended(self, job: Submission) -> bool:
        """Whether all jobs of the trial have ended. Raises ClusterError if Slurm can't tell."""
        return all(part.state.has_ended for part in self._asked(job).jobs_of(job))

    def _cancellable(self, job: Submission) -> list[str]:
        """Lists the ids under which Slurm has jobs of the trial at this moment; as ``_has_ended``."""
        return self._asked(job).cancellable(job)

    def _asked(self, job: Submission) -> JobBoard:
        board, plan = JobBoard(), self.reader.plan
        found = board.job(job, accounting=plan.cluster.slurm.accounting if plan else None)
        if found is None or (found.state is JobState.UNKNOWN and not found.doubt):
            raise ClusterError(
                f"Slurm does not report the state of job {job.job_id}: {'; '.join(board.problems)}",
                where=f"squeue -j {job.job_id}",
                fix="try again when slurmctld answers (scontrol ping)",
            )
        board.cancellable(job)  # raises if one of them can't be told from another's
        return board

    def _refuse_if_unknown_to_slurm(self, job: Submission) -> None:
        """Raises ClusterError if the run goes on although Slurm has no job of the trial to end."""
        if self._cancellable(job):
            return
        with closing(StatusReader(self.reader.files)) as reader:  # it asks Slurm anew
            view = reader.view()
        if view.state not in State.live():
            return
        places = sorted({f"{w.host} (pid {w.pid})" for w in view.workers if w.host and w.pid})
        raise ClusterError(
            f"{view.trial} still runs, and Slurm has no job of it to cancel: {view.reason}",
            where=f"squeue -j {job.job_id}",
            fix=f"end its processes there: {listed(places, MOST_PLACES) or view.host}",
        )

    def _await_gone(self, job: Submission, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pauses = iter(POLL_PAUSES_S)
        while not self._has_ended(job):
            if time.monotonic() > deadline:
                return False
            time.sleep(next(pauses, POLL_PAUSES_S[-1]))
        return True


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
