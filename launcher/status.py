"""Reads a trial's records: folder, name resolution and processes, thinly; launcher/trial_view.py
decides what they mean.

Never an exception for what is missing, damaged or unreachable: that becomes a note in the view. It
writes nothing, and reads no log.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from launcher.liveness import Liveness, liveness
from launcher.slurm.job_board import WATCH_AGE_S, JobBoard
from launcher.slurm.query import JobInfo
from launcher.submission import Submission, that_counts
from launcher.trial_view import Records, TrialView, view_of
from realsys.api.errors import KeyNotFound, RealsysError, StoreUnavailable
from realsys.api.plan import LaunchPlan, read_plan
from realsys.api.trial import (
    AttemptRecord,
    ExitMarker,
    Progress,
    StopRequest,
    TrialFiles,
    TrialRecord,
    WorkerRecord,
    WorkerStatus,
    loads,
    read_record,
)
from realsys.name_resolve.keys import TrialKeys
from realsys.name_resolve.store import NameResolve
from realsys.observability.evaluations import last_figures
from realsys.observability.jsonl import read_jsonl

T = TypeVar("T")
TAIL_BYTES = 65_536
LEAST_FREE_BYTES = 1 << 20


def trial_view(files: TrialFiles, *, board: JobBoard | None = None) -> TrialView:
    """The trial as it is now."""
    with closing(TrialReader(files, board=board)) as reader:
        return reader.view()


def trial_views(trials: Sequence[TrialFiles]) -> list[TrialView]:
    """All of them as they are now, with one query to Slurm in all."""
    board = JobBoard()
    readers = [TrialReader(files, board=board) for files in trials]
    asked = [s for reader in readers if (s := reader.unsettled_job()) is not None]
    board.expect(asked)
    views = []
    for reader in readers:
        with closing(reader):
            views.append(reader.view())
    return views


def keys_of(plan: LaunchPlan) -> TrialKeys:
    """The trial's keys in name resolution."""
    return TrialKeys(
        cluster=plan.cluster.name,
        user=plan.user,
        experiment=plan.experiment_name,
        trial=plan.trial_name,
    )


class TrialReader:
    """Reads one trial again and again, keeping its plan and the connection to its store."""

    def __init__(self, files: TrialFiles, *, board: JobBoard | None = None) -> None:
        self.files, self._board = files, board or JobBoard(max_age_s=WATCH_AGE_S)
        self._plan: LaunchPlan | None = None
        self._store: NameResolve | None = None
        self._store_is_away = False
        self._notes: list[str] = []

    @property
    def plan(self) -> LaunchPlan | None:
        """The plan, if it can be read."""
        if self._plan is None:
            with self._noted():
                self._plan = read_plan(self.files.plan)
        return self._plan

    def close(self) -> None:
        """Gives the store back."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def view(self) -> TrialView:
        """The trial as it is now."""
        return view_of(self.records())

    def records(self) -> Records:
        """Everything, as it is now.

        Liveness is read before the exit marker, and the marker again after Slurm has said that the job
        is over: a supervisor that ends between two reads has written its marker first, so it can't look
        lost.
        """
        self._notes = []
        self._store_is_away = False
        files, plan = self.files, self.plan
        submission = self._file(Submission, files.submission)
        self._check_space()
        attempt, supervisor, marker = self._last_attempt()
        job = self._job(submission, attempt, marker)
        if job is not None and job.state.has_ended and marker is None:
            attempt, supervisor, marker = self._last_attempt()
        workers, statuses, heartbeats = self._workers()
        on_slurm = submission is not None and submission.on_slurm
        return Records(
            trial=plan.trial if plan else "/".join(files.root.parts[-2:]),
            folder=str(files.root),
            now=time.time(),
            plan=plan,
            record=self._file(TrialRecord, files.record),
            submission=submission and that_counts(submission, attempt),
            submission_alive=self._alive(submission),
            job=job,
            attempt=attempt,
            supervisor=supervisor,
            exit=marker,
            stop=self._value(StopRequest, "stop"),
            progress=self._value(Progress, "progress"),
            workers=workers,
            statuses=statuses,
            # On Slurm a pid means something on its node only: there the lease is the sign of life.
            alive={}
            if on_slurm
            else {n: liveness(w.host, w.pid, w.start) for n, w in workers.items()},
            heartbeats=heartbeats,
            restarts=self._restarts(),
            published=self._published(),
            metrics=self._metrics(),
            notes=tuple(self._notes),
        )

    def _last_attempt(self) -> tuple[AttemptRecord | None, Liveness, ExitMarker | None]:
        """Its record, whether its supervisor lives as far as this host can say, and its end."""
        attempts = self.files.all_attempts()
        if not attempts:
            return None, Liveness.NONE, None
        attempt = self._file(AttemptRecord, attempts[-1].record)
        supervisor = Liveness.NONE
        if attempt is not None:
            supervisor = liveness(attempt.host, attempt.supervisor_pid, attempt.supervisor_start)
        return attempt, supervisor, self._file(ExitMarker, attempts[-1].exit)

    def _metrics(self) -> dict[str, Any]:
        """The last row of the main phase, with the figures of the newest checkpoint evaluated."""
        phase = TrialFiles.phase(self.files.root)
        metrics = last_metrics(phase.metrics)
        with self._noted():
            metrics |= last_figures(read_jsonl(phase.evaluations))
        return metrics

    def _restarts(self) -> list[dict[str, Any]]:
        """Of single workers in the last attempt."""
        attempts = self.files.all_attempts()
        with self._noted():
            return read_jsonl(attempts[-1].restarts) if attempts else []
        return []

    def unsettled_job(self) -> Submission | None:
        """The hand-over whose job Slurm must be asked about; None where the records say it all."""
        submission = self._file(Submission, self.files.submission)
        if submission is None or not submission.on_slurm:
            return None
        attempts = self.files.all_attempts()
        if not attempts or attempts[-1].number <= submission.after_attempt:
            return submission
        is_over = self._file(ExitMarker, attempts[-1].exit) is not None
        may_go_on = self.plan is None or self.plan.job is None or self.plan.job.requeue
        if is_over and not may_go_on:
            attempt = self._file(AttemptRecord, attempts[-1].record)
            return None if that_counts(submission, attempt) is submission else submission
        return submission

    def _alive(self, submission: Submission | None) -> Liveness:
        if submission is None:
            return Liveness.NONE
        if submission.on_slurm:
            return Liveness.UNKNOWN
        return liveness(submission.host, submission.pid, submission.start)

    def _job(
        self,
        submission: Submission | None,
        attempt: AttemptRecord | None,
        marker: ExitMarker | None,
    ) -> JobInfo | None:
        if submission is None or not submission.on_slurm:
            return None
        if marker is not None and self.unsettled_job() is None:
            return None  # the marker says it all
        news = max(attempt.started_at if attempt else 0.0, marker.ended_at if marker else 0.0)
        accounting = self._plan.cluster.slurm.accounting if self._plan else None
        counts = that_counts(submission, attempt)
        found = self._board.job(counts, news_at=news, accounting=accounting)
        if counts is not submission and (found is None or found.state.has_ended):
            later = self._board.job(submission, news_at=news, accounting=accounting)
            if later is not None and not later.state.has_ended:  # it waits, and will begin
                found = later
        for problem in self._board.problems:
            self._note(problem)
        return found

    def _check_space(self) -> None:
        """A note when the disk of the trial is full: records that should be there may be missing."""
        with suppress(OSError):
            disk = os.statvfs(self.files.root)
            if disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
                self._note(
                    f"no space left on the disk of {self.files.root}: free some, then resume"
                )

    def _published(self) -> frozenset[str]:
        phases = self._plan.phases if self._plan else ()
        return frozenset(p.name for p in phases if p.publish and Path(p.publish).is_dir())

    def _workers(
        self,
    ) -> tuple[dict[str, WorkerRecord], dict[str, WorkerStatus], dict[str, float]]:
        """Records, states and ages of the last heartbeat, by worker."""
        if self._plan is None:
            return {}, {}, {}
        keys = keys_of(self._plan)
        heartbeats: dict[str, float] = {}
        records = self._subtree(WorkerRecord, keys.workers, heartbeats)
        return records, self._subtree(WorkerStatus, keys.worker_statuses), heartbeats

    def _subtree(
        self, kind: type[T], prefix: str, heartbeats: dict[str, float] | None = None
    ) -> dict[str, T]:
        found: dict[str, T] = {}
        with self._noted():
            store = self._opened()
            for entry in store.get_subtree(prefix) if store else ():
                with self._noted():
                    name = entry.key.removeprefix(f"{prefix}/")
                    found[name] = loads(kind, entry.value, where=entry.key)
                    age_s = (
                        store.renewed_ago_s(entry.lease_id) if entry.lease_id and store else None
                    )
                    if heartbeats is not None and age_s is not None:
                        heartbeats[name] = age_s
        return found

    def _value(self, kind: type[T], name: str) -> T | None:
        if self._plan is None:
            return None
        key = f"{keys_of(self._plan).root}/{name}"
        with self._noted():
            store = self._opened()
            try:
                return loads(kind, store.get(key).value, where=key) if store else None
            except KeyNotFound:
                return None
        return None

    def _opened(self) -> NameResolve | None:
        """The store; None while it does not exist, when it ended with its job, and for the rest of a
        look after it has not answered once. Opening it would make its folder."""
        if self._plan is None or self._store_is_away:
            return None
        from realsys.name_resolve.trial_store import has_job_etcd, open_trial_store

        attempts = self.files.all_attempts()
        if not attempts or (has_job_etcd(self._plan) and attempts[-1].exit.exists()):
            return None
        if self._store is None:
            self._store = open_trial_store(self._plan, attempts[-1])
        return self._store

    def _file(self, kind: type[T], path: Path) -> T | None:
        with self._noted():
            return read_record(kind, path)
        return None

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """What can't be read is told, not raised: the rest is worth showing."""
        try:
            yield
        except RealsysError as error:
            self._store_is_away |= isinstance(error, StoreUnavailable)
            self._note(f"{error.what} ({error.where})")
        except Exception as error:  # damaged content fails in any way; `status` never does
            self._note(f"{type(error).__name__}: {error}")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics file; empty when there is none."""
    for line in reversed(tail_lines(path)):
        try:
            content = json.loads(line)
        except ValueError:
            continue  # being written right now
        if isinstance(content, dict):
            return content
    return {}


def tail_lines(path: Path, *, max_bytes: int = TAIL_BYTES) -> list[str]:
    """Lines at the end of a file; the first may be cut. Empty when it can't be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
