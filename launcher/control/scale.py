"""Scales a live run: writes who shall come and go, and waits until it is so.

Who that is decides scale_plan.py. The supervisor starts workers and sees them off
(realsys/supervisor/scaling/worker_scaling.py); master and manager let those that go finish.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from launcher.control.scale_plan import ScaleChange, ScaleRequest, Unit, rescaled, units
from launcher.sites.places import user_name
from launcher.trials.status import TrialReader
from launcher.trials.trial_state import State
from launcher.trials.trial_view import TrialView, view_of
from realsys.api.errors import ConfigError, TrialError, WaitTimeout
from realsys.api.plan import JobLayout, LaunchPlan, PhasePlan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.trial_store import open_trial_store
from realsys.observability.jsonl import read_jsonl
from realsys.trial.records import AttemptRecord
from realsys.worker.live_scaling import LEFT_LATE_S, Scaling, change_scaling, read_scaling

POLL_S = 0.25
GOODBYE_S = 30.0  # over the time that a worker has to finish, and to be killed after it
# Workers in these states have something to do, or wait for it.
AT_WORK = ("running", "paused")


def scale(
    reader: TrialReader, wish: ScaleRequest, *, timeout_s: float, say: Callable[[str], None]
) -> list[tuple[str, ...]]:
    """Makes it so, and waits; returns a row for each that is there then: name, workers.

    Args:
        timeout_s: for those that come; those that go may take their time to finish beside it.
        say: gets a line for each that has come or gone.
    Raises:
        ConfigError, UnknownName: see scale_plan.py.
        TrialError: the trial does not run, can't be scaled, or one that was added could not be started.
        WaitTimeout: it was not so in time; it may still become so.
    """
    plan, attempt, phase = _running(reader)
    _check_layout(plan, wish)
    files, keys = reader.files.attempt(attempt.number), TrialKeys.of(plan)
    with closing(open_trial_store(plan, files)) as store:
        if not (wish.counts or wish.drain):
            found = read_scaling(store, keys, token=attempt.token, phase=phase.name)
            return _rows(phase, found or _none(attempt, phase))
        changes: list[ScaleChange] = []

        def change(before: Scaling) -> Scaling:
            changes.append(rescaled(phase.config, before, wish))
            after = changes[-1].scaling
            if after == before:
                return before
            return replace(after, by=f"{user_name()}@{socket.gethostname()}", at=time.time())

        after = change_scaling(store, keys, attempt, phase=phase.name, change=change)
    limit_s = timeout_s + (wish.grace_s + LEFT_LATE_S + GOODBYE_S if changes[-1].going else 0.0)
    _Waiting(reader, changes[-1], say).wait(limit_s)
    return _rows(phase, after)


def _running(reader: TrialReader) -> tuple[LaunchPlan, AttemptRecord, PhasePlan]:
    """Raises TrialError when there is no attempt at work."""
    records = reader.records()
    view = view_of(records)
    plan, attempt = reader.plan, records.attempt
    if view.state not in State.live() or attempt is None or plan is None:
        raise TrialError(
            f"{view.trial} is {view.state.value}",
            where="scale",
            fix="only a running trial can be scaled; for the next start set its options at launch",
        )
    return plan, attempt, plan.phase(view.phase)


def _check_layout(plan: LaunchPlan, wish: ScaleRequest) -> None:
    if wish.counts and plan.job is not None and plan.job.layout is JobLayout.SPLIT:
        raise ConfigError(
            "the trial's jobs were started apart: nothing can be added to them",
            where="layout split",
            fix="use --drain, or launch with --layout single or het",
        )


def _none(attempt: AttemptRecord, phase: PhasePlan) -> Scaling:
    return Scaling(attempt=attempt.number, token=attempt.token, phase=phase.name)


def _rows(phase: PhasePlan, scaling: Scaling) -> list[tuple[str, ...]]:
    there = [unit for unit in units(phase.config, scaling) if not unit.is_going]
    return [(unit.name, *(w for w in unit.workers if w != unit.name)) for unit in there]


class _Waiting:
    """Until all have come and gone."""

    def __init__(
        self, reader: TrialReader, change: ScaleChange, say: Callable[[str], None]
    ) -> None:
        self._reader, self._say = reader, say
        self._coming, self._going = list(change.coming), list(change.going)

    def wait(self, timeout_s: float) -> None:
        """Raises TrialError, WaitTimeout."""
        deadline = time.monotonic() + timeout_s
        while self._coming or self._going:
            records = self._reader.records()
            view = view_of(records)
            path = self._reader.files.attempt(view.attempt).scaling
            rows = read_jsonl(path) if path.exists() else []
            self._look(view, rows)
            if not (self._coming or self._going):
                return
            if view.state not in State.live():
                raise TrialError(
                    f"{view.trial} is {view.state.value}: it ended before {self._left()}",
                    where="scale",
                    fix="a resumed trial begins with the workers of its plan",
                )
            if records.stop is not None and view.state is State.STOPPING:
                raise TrialError(
                    f"{view.trial} is being stopped: nobody comes or goes any more",
                    where="scale",
                    fix="a resumed trial begins with the workers of its plan",
                )
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"not in {timeout_s:g} s: {self._left()}",
                    where=str(path),
                    fix=f"look with `realsys status {view.trial}` and `realsys logs`; it is still wanted",
                )
            time.sleep(POLL_S)

    def _look(self, view: TrialView, rows: Sequence[dict[str, Any]]) -> None:
        for row in _those(rows, "failed"):
            for unit in self._coming:
                if row["worker"] in unit.workers:
                    raise TrialError(
                        f"{unit.name} could not be added: {row['worker']}: {row.get('why')}",
                        where="scale",
                        fix=str(row.get("fix") or f"realsys logs {view.trial} {row['worker']}"),
                    )
        at_work = {w.worker: w for w in view.workers if w.state in AT_WORK}
        left = {row["worker"]: row for row in _those(rows, "left")}
        for unit in [u for u in self._coming if at_work.keys() >= set(u.workers)]:
            self._coming.remove(unit)
            where = ", ".join(
                f"{w} (pid {at_work[w].pid} on {at_work[w].host})" for w in unit.workers
            )
            self._say(f"{unit.name} is there: {where}")
        for unit in [u for u in self._going if left.keys() >= set(u.workers)]:
            self._going.remove(unit)
            late = [w for w in unit.workers if left[w].get("killed")]
            self._say(f"{unit.name} has left" + (f"; killed: {', '.join(late)}" if late else ""))

    def _left(self) -> str:
        told = [f"{_names(self._coming)} came"] if self._coming else []
        told += [f"{_names(self._going)} left"] if self._going else []
        return " and ".join(told)


def _those(rows: Sequence[dict[str, Any]], event: str) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row.get("event") == event)


def _names(some: Sequence[Unit]) -> str:
    return ", ".join(unit.name for unit in some)
