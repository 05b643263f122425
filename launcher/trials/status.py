"""Reads how a trial stands: its folder (realsys/trial/trial_reader.py), and besides that its store, its
processes and Slurm. launcher/trials/trial_view.py interprets what was read.

Never raises for what is missing, damaged or unreachable: that becomes a note in the view. It writes
nothing, and of logs it reads only srun's messages about a step that does not start.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from launcher.trials.job_board import WATCH_AGE_S, JobBoard
from launcher.trials.merged_logs import worker_of
from launcher.trials.submission import Submission, batch_logs, effective_submission, read_submission
from launcher.trials.trial_view import KnownProgress, Records, TrialView, view_of
from realsys.api.errors import KeyNotFound, StoreUnavailable
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.observability.evaluations import last_figures
from realsys.observability.jsonl import read_jsonl
from realsys.observability.metric_catalogue import with_current_names
from realsys.slurm.srun_messages import step_wait
from realsys.trial.last_lines import last_lines
from realsys.trial.liveness import Liveness, liveness
from realsys.trial.machine_identity import Whereabouts, whereabouts
from realsys.trial.records import (
    AssumedEnd,
    AttemptFiles,
    AttemptRecord,
    Progress,
    StopRequest,
    TrialFiles,
    TrialRecord,
    WorkerRecord,
    WorkerStatus,
    loads,
)
from realsys.trial.trial_reader import MAX_ROWS_BYTES, Attempt, TrialReader, check_regular
from realsys.trial.trial_state import JobState

if TYPE_CHECKING:
    from launcher.slurm.query.job_query import JobInfo
    from realsys.api.plan import LaunchPlan
    from realsys.trial.plan_summary import PlanSummary

T = TypeVar("T")
MIN_FREE_BYTES = 4 << 20  # more than what the supervisor frees for its exit marker
MAX_HEARTBEAT_QUERIES = 200  # of workers' heartbeats: each is a query to the store
STORE_UNREAD = "its store can't be read"


def trial_view(
    files: TrialFiles, *, board: JobBoard | None = None, ages: bool = False
) -> TrialView:
    """Reads the trial's present view.

    With ``ages`` also the age of each worker's last heartbeat, which costs one query to the store each.
    """
    with closing(StatusReader(files, board=board)) as reader:
        return view_of(reader.records(ages=ages))


def trial_views(trials: Sequence[TrialFiles]) -> list[TrialView]:
    """Reads the present views of all trials, with a single query to Slurm."""
    board = JobBoard()
    readers = [StatusReader(files, board=board) for files in trials]
    asked = [s for reader in readers if (s := reader.unsettled_job()) is not None]
    board.expect(asked)
    views = []
    for reader in readers:
        with closing(reader):
            views.append(reader.view())
    return views


class StatusReader(TrialReader):
    """Reads one trial repeatedly, keeping its plan and the connection to its store."""

    def __init__(self, files: TrialFiles, *, board: JobBoard | None = None) -> None:
        super().__init__(files)
        self._board = board or JobBoard(max_age_s=WATCH_AGE_S)
        self._plan: LaunchPlan | PlanSummary | None = None
        self._store: NameResolve | None = None
        self._store_of = 0  # number of the attempt that it was opened for
        self._store_is_away = False
        self._last_progress: Progress | None = None

    def close(self) -> None:
        """Closes the connection to the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def view(self) -> TrialView:
        """Reads the trial's present view."""
        return view_of(self.records())

    def brief_view(self) -> TrialView:
        """Reads the view without workers, unless the state depends on them, to wait for the end cheaply.

        The view of thousands of workers takes megabytes.
        """
        return view_of(self.records(workers=False))

    def records(self, *, ages: bool = False, workers: bool = True) -> Records:
        """Reads all records.

        The exit marker is read again after Slurm reported the job's end, so that a supervisor that has just
        exited can't appear lost.

        Args:
            ages: also the age of each worker's last heartbeat: one query to the store each.
            workers: False if only the state is needed.
        """
        self.notes, self.unread = [], ""
        self._store_is_away = False
        files, plan = self.files, self.summary
        self._plan = plan
        submission = self._submission()
        full = self._check_space()
        last = self.last_attempt()
        job = self._job(submission, last)
        if job is not None and job.state.has_ended and last is not None and last.marker is None:
            last = self.last_attempt()
        attempt, marker = (last.record, last.marker) if last else (None, None)
        supervisor = last.supervisor if last else Liveness.NONE
        on_slurm = submission is not None and submission.on_slurm
        # For a run on another host without Slurm, or of which Slurm has no record, the workers' leases are
        # the only sign of life.
        unrecorded = job is not None and job.state is JobState.GONE
        renamed = attempt is not None and attempt.host != socket.gethostname()
        unseen = supervisor is Liveness.UNKNOWN or (supervisor is Liveness.DEAD and renamed)
        wanted = workers or unrecorded or (unseen and not on_slurm)
        found, statuses, heartbeats = self._workers(ages=ages) if wanted else ({}, {}, {})
        if supervisor in (Liveness.UNKNOWN, Liveness.DEAD) and attempt is not None and not on_slurm:
            supervisor = self._supervisor_by_leases(supervisor, attempt, found)
        stop, progress = self._value(StopRequest, "stop"), self._value(Progress, "progress")
        begun, known = last.files if last else None, None
        if begun is not None and self.unread and marker is None:
            known = self._last_known(begun)
            progress = self._last_progress
        self._last_progress = progress
        is_unread = attempt is None and (known is not None or supervisor is Liveness.UNKNOWN)
        return Records(
            trial=plan.trial if plan else "/".join(files.root.parts[-2:]),
            folder=str(files.root),
            now=time.time(),
            plan=plan,
            plan_fix="" if plan else self.plan_fix,
            record=self.record(TrialRecord, files.record),
            submission=submission and effective_submission(submission, attempt),
            submission_alive=self._alive(submission),
            job=job,
            attempt=attempt,
            supervisor=supervisor,
            exit=marker,
            stop=stop,
            progress=progress,
            workers=found,
            statuses=statuses,
            # On Slurm a pid is meaningful only on its node; the lease is the sign of life there.
            alive={}
            if on_slurm
            else {n: self._worker_liveness(w, attempt) for n, w in found.items()},
            heartbeats=heartbeats,
            restarts=self._rows(begun.restarts) if begun else [],
            published=self._published(),
            metrics=self._metrics(),
            unread=self.unread if known else "",
            unread_attempt=last.files.number if last and is_unread else 0,
            known=known,
            logged=_logged(begun) if begun and progress is None and marker is None else frozenset(),
            step_waits=_step_waits(begun) if begun and progress is None and on_slurm else {},
            full=full,
            batch_log=str(next(reversed(batch_logs(files, submission)), "")) if not begun else "",
            notes=tuple(self.notes),
        )

    def _supervisor_by_leases(
        self, supervisor: Liveness, attempt: AttemptRecord, workers: Mapping[str, WorkerRecord]
    ) -> Liveness:
        """Decides about a supervisor that was started under another name, or is assumed to have ended: as
        long as its workers hold their leases nothing of that counts.
        """
        if any(worker.attempt == attempt.number for worker in workers.values()):
            is_here = whereabouts(attempt.host, attempt.machine) is Whereabouts.HERE
            return supervisor if is_here else Liveness.UNKNOWN
        if supervisor is Liveness.UNKNOWN and self._is_assumed_ended(attempt=attempt.number):
            return Liveness.DEAD
        return supervisor

    def _last_known(self, attempt: AttemptFiles) -> KnownProgress:
        """Determines the attempt's progress from the files in the trial's folder."""
        last = self._last_progress
        known = KnownProgress(has_begun=next(attempt.root.glob("resumed-*.json"), None) is not None)
        if last is not None and last.attempt == attempt.number:
            known = KnownProgress(
                has_begun=True, step=last.step, at=last.updated_at, phase=last.phase
            )
        for folder in (*sorted(self.files.root.glob("prepare/*")), self.files.root):
            rows = TrialFiles.phase(folder).rows_of(attempt.number).metrics
            with suppress(OSError, ValueError, TypeError):
                at, step = rows.stat().st_mtime, int(last_metrics(rows).get("step", 0))
                if at >= known.at and step:
                    phase = folder.name if folder != self.files.root else ""
                    known = KnownProgress(has_begun=True, step=step, at=at, phase=phase)
        return known

    def _metrics(self) -> dict[str, Any]:
        """Reads the last row of the main phase, with the figures of the newest evaluated checkpoint."""
        phase = TrialFiles.phase(self.files.root)
        metrics = last_metrics(phase.metrics)
        return metrics | last_figures(self._rows(phase.evaluations))

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        """Reads a file of rows; none if it is damaged."""
        with self.noted():
            check_regular(path, max_bytes=MAX_ROWS_BYTES)
            return read_jsonl(path)
        return []

    def unsettled_job(self) -> Submission | None:
        """Returns the submission whose job must be queried; None if the records suffice."""
        self._plan = self.summary
        return self._unsettled(self._submission(), self.last_attempt())

    def _unsettled(self, submission: Submission | None, last: Attempt | None) -> Submission | None:
        if submission is None or not submission.on_slurm:
            return None
        if last is None or last.marker is None or last.files.number <= submission.after_attempt:
            return submission
        may_go_on = self._plan is None or self._plan.job is None or self._plan.job.requeue
        is_latest = effective_submission(submission, last.record) is submission
        return None if is_latest and not may_go_on else submission

    def _submission(self) -> Submission | None:
        with self.noted():
            return read_submission(self.files)
        return None

    def _alive(self, submission: Submission | None) -> Liveness:
        if submission is None:
            return Liveness.NONE
        if submission.on_slurm:
            return Liveness.UNKNOWN
        if self._is_assumed_ended(submission=submission):
            return Liveness.DEAD
        pid, start = submission.pid, submission.start
        return liveness(submission.host, pid, start, submission.machine)

    def _worker_liveness(self, worker: WorkerRecord, attempt: AttemptRecord | None) -> Liveness:
        """A worker without a Slurm runs on its supervisor's machine."""
        machine = attempt.machine if attempt and attempt.host == worker.host else None
        return liveness(worker.host, worker.pid, worker.start, machine)

    def _is_assumed_ended(
        self, *, attempt: int | None = None, submission: Submission | None = None
    ) -> bool:
        """Whether a user has said that this attempt, or this submission's process, has ended."""
        assumed = self.record(AssumedEnd, self.files.assumed_end)
        if assumed is None:
            return False
        if submission is not None:  # a later one's id may be equal: a pid is, in a new container
            return assumed.job_id == submission.job_id and assumed.at >= submission.at
        return assumed.attempt == attempt

    def _job(self, submission: Submission | None, last: Attempt | None) -> JobInfo | None:
        if submission is None or self._unsettled(submission, last) is None:
            return None
        attempt, marker = (last.record, last.marker) if last else (None, None)
        news = max(attempt.started_at if attempt else 0.0, marker.ended_at if marker else 0.0)
        accounting = self._plan.cluster.slurm.accounting if self._plan else None
        counts = effective_submission(submission, attempt)
        found = self._board.job(counts, news_at=news, accounting=accounting)
        if counts is not submission and (found is None or found.state.has_ended):
            later = self._board.job(submission, news_at=news, accounting=accounting)
            if later is not None and not later.state.has_ended:  # pending, and will start
                found = later
        for problem in self._board.problems:
            self.note(problem)
        # Slurm has a job of the id, and only the user knows that it is not this one.
        if found is not None and found.doubt and self._is_assumed_ended(submission=counts):
            return replace(found, state=JobState.GONE)
        return found

    def _check_space(self) -> str:
        """Returns a note if a disk of the trial is full: then records may be missing."""
        store = self._plan.name_resolve_url if self._plan else ""
        folders = [str(self.files.root)]
        folders += [unquote(store.removeprefix("file://"))] if store.startswith("file://") else []
        for folder in folders:
            with suppress(OSError):
                disk = os.statvfs(folder)
                free = disk.f_bavail * disk.f_frsize
                no_files = disk.f_files > 0 and disk.f_favail == 0
                if free < MIN_FREE_BYTES or no_files:
                    left = "room for another file" if no_files else "space"
                    self.note(
                        full := f"no {left} left on the disk of {folder}: free some, then resume"
                    )
                    return full
        return ""

    def _published(self) -> frozenset[str]:
        phases = self._plan.phases if self._plan else ()
        return frozenset(p.name for p in phases if p.publish and Path(p.publish).is_dir())

    def _workers(
        self, *, ages: bool
    ) -> tuple[dict[str, WorkerRecord], dict[str, WorkerStatus], dict[str, float]]:
        """Reads records, statuses and heartbeat ages, by worker."""
        if self._plan is None:
            return {}, {}, {}
        keys = TrialKeys.of(self._plan)
        heartbeats: dict[str, float] = {}
        records = self._subtree(WorkerRecord, keys.workers, heartbeats if ages else None)
        return records, self._subtree(WorkerStatus, keys.worker_statuses), heartbeats

    def _subtree(
        self, kind: type[T], prefix: str, heartbeats: dict[str, float] | None = None
    ) -> dict[str, T]:
        found: dict[str, T] = {}
        with self._noted_of_store():
            store = self._opened()
            for entry in store.get_subtree(prefix) if store else ():
                with self._noted_of_store(""):
                    name = entry.key.removeprefix(f"{prefix}/")
                    found[name] = loads(kind, entry.value, where=entry.key)
                    if heartbeats is None or store is None or not entry.lease_id:
                        continue
                    if len(heartbeats) >= MAX_HEARTBEAT_QUERIES:
                        continue
                    if (age_s := store.renewed_ago_s(entry.lease_id)) is not None:
                        heartbeats[name] = age_s
        return found

    def _value(self, kind: type[T], name: str) -> T | None:
        if self._plan is None:
            return None
        key = f"{TrialKeys.of(self._plan).root}/{name}"
        with self._noted_of_store():
            store = self._opened()
            try:
                return loads(kind, store.get(key).value, where=key) if store else None
            except KeyNotFound:
                return None
        return None

    def _opened(self) -> NameResolve | None:
        """Opens the store; None if it does not exist yet, ended with its job, or already failed to
        answer.

        Opening it earlier would create its folder.
        """
        if self._plan is None or self._store_is_away:
            return None
        from realsys.name_resolve.trial_store import has_job_etcd, open_trial_store

        attempts = self.files.all_attempts()
        if not attempts:
            return None
        if has_job_etcd(self._plan):  # each attempt has one of its own
            if attempts[-1].exit.exists() or not attempts[-1].etcd_access.exists():
                return None
            if self._store_of != attempts[-1].number:
                self.close()
        if self._store is None:
            self._store = open_trial_store(self._plan, attempts[-1])
            self._store_of = attempts[-1].number
        return self._store

    @contextmanager
    def _noted_of_store(self, unread: str = STORE_UNREAD) -> Iterator[None]:
        """Turns exceptions into notes, and asks a store that is away no more this time."""
        with self.noted(unread):
            try:
                yield
            except StoreUnavailable:
                self._store_is_away = True
                raise


def _logged(attempt: AttemptFiles) -> frozenset[str]:
    """Names the workers that have a log."""
    try:
        return frozenset(worker_of(path) for path in attempt.logs.glob("*.log"))
    except OSError:
        return frozenset()


def _step_waits(attempt: AttemptFiles) -> dict[str, str]:
    """Maps each worker type to srun's message while it can't start that step."""
    waits = {}
    for path in attempt.logs.glob("srun-*.log"):
        if sentence := step_wait("\n".join(last_lines(path))):
            waits[path.stem.removeprefix("srun-")] = sentence
    return waits


def last_metrics(path: Path) -> dict[str, Any]:
    """Reads the last complete line of a metrics file; empty if there is none."""
    for line in reversed(last_lines(path)):
        try:
            content = json.loads(line)
        except ValueError:
            continue  # being written right now
        if isinstance(content, dict):
            return with_current_names(content)
    return {}
