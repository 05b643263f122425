"""Scales a live run: publishes which workers to add and to drain, and waits until that is done.

scale_plan.py decides which. The supervisor starts workers and ends drained ones
(realsys/supervisor/scaling/worker_scaling.py); master and manager let drained ones finish.
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
from launcher.trials.status import StatusReader
from launcher.trials.trial_view import TrialView, view_of
from realsys.api.errors import ConfigError, TrialError, WaitTimeout
from realsys.api.plan import JobLayout, LaunchPlan, PhasePlan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.trial_store import open_trial_store
from realsys.observability.jsonl import read_jsonl
from realsys.trial.records import AttemptRecord
from realsys.trial.trial_state import State
from realsys.worker.live_scaling import LEFT_LATE_S, Scaling, change_scaling, read_scaling

POLL_S = 0.25
DEREGISTRATION_S = 30.0  # beyond a worker's time to finish, and to be killed after it
# Workers in these states work or wait for work.
AT_WORK = ("running", "paused")


def scale(
    reader: StatusReader, request: ScaleRequest, *, timeout_s: float, say: Callable[[str], None]
) -> list[tuple[str, ...]]:
    """Applies the request and waits; returns a row (name, workers) for each unit that then runs.

    Args:
        timeout_s: for added units; drained ones additionally have their time to finish.
        say: called with a line for each unit that was added or has left.
    Raises:
        ConfigError, UnknownName: see scale_plan.py.
        TrialError: the trial does not run, can't be scaled, or an added unit could not be started.
        WaitTimeout: it was not done in time; the request remains in effect.
    """
    plan, attempt, phase = _running(reader)
    _check_layout(plan, request)
    files, keys = reader.files.attempt(attempt.number), TrialKeys.of(plan)
    with closing(open_trial_store(plan, files)) as store:
        if not (request.counts or request.drain):
            found = read_scaling(store, keys, token=attempt.token, phase=phase.name)
            none = Scaling(attempt=attempt.number, token=attempt.token, phase=phase.name)
            return _rows(phase, found or none)
        changes: list[ScaleChange] = []

        def change(before: Scaling) -> Scaling:
            changes.append(rescaled(phase.config, before, request))
            after = changes[-1].scaling
            if after == before:
                return before
            return replace(after, by=f"{user_name()}@{socket.gethostname()}", at=time.time())

        after = change_scaling(store, keys, attempt, phase=phase.name, change=change)
    limit_s = timeout_s + (
        request.grace_s + LEFT_LATE_S + DEREGISTRATION_S if changes[-1].draining else 0.0
    )
    _ScaleWaiter(reader, changes[-1], say).wait(limit_s)
    return _rows(phase, after)


def _running(reader: StatusReader) -> tuple[LaunchPlan, AttemptRecord, PhasePlan]:
    """Returns plan, attempt and phase. Raises TrialError if no attempt runs."""
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


def _check_layout(plan: LaunchPlan, request: ScaleRequest) -> None:
    if request.counts and plan.job is not None and plan.job.layout is JobLayout.SPLIT:
        raise ConfigError(
            "the trial's jobs were started separately: nothing can be added to them",
            where="layout split",
            fix="use --drain, or launch with --layout single or het",
        )


def _rows(phase: PhasePlan, scaling: Scaling) -> list[tuple[str, ...]]:
    there = [unit for unit in units(phase.config, scaling) if not unit.is_draining]
    return [(unit.name, *(w for w in unit.workers if w != unit.name)) for unit in there]


class _ScaleWaiter:
    """Waits until all added units run and all drained ones have left."""

    def __init__(
        self, reader: StatusReader, change: ScaleChange, say: Callable[[str], None]
    ) -> None:
        self._reader, self._say = reader, say
        self._starting, self._draining = list(change.starting), list(change.draining)

    def wait(self, timeout_s: float) -> None:
        """Waits. Raises TrialError, WaitTimeout."""
        deadline = time.monotonic() + timeout_s
        while self._starting or self._draining:
            records = self._reader.records()
            view = view_of(records)
            path = self._reader.files.attempt(view.attempt).scaling
            rows = read_jsonl(path) if path.exists() else []
            self._look(view, rows)
            if not (self._starting or self._draining):
                return
            ending = ""
            if view.state not in State.live():
                ending = f"is {view.state.value}: it ended before {self._left()}"
            elif records.stop is not None and view.state is State.STOPPING:
                ending = "is being stopped: scaling has no effect any more"
            if ending:
                raise TrialError(
                    f"{view.trial} {ending}",
                    where="scale",
                    fix="a resumed trial starts with the workers of its plan",
                )
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"not within {timeout_s:g} s: {self._left()}",
                    where=str(path),
                    fix=f"see `realsys status {view.trial}` and `realsys logs`; the request remains",
                )
            time.sleep(POLL_S)

    def _look(self, view: TrialView, rows: Sequence[dict[str, Any]]) -> None:
        for row in _events(rows, "failed"):
            for unit in self._starting:
                if row["worker"] in unit.workers:
                    raise TrialError(
                        f"{unit.name} could not be added: {row['worker']}: {row.get('why')}",
                        where="scale",
                        fix=str(row.get("fix") or f"realsys logs {view.trial} {row['worker']}"),
                    )
        at_work = {w.worker: w for w in view.workers if w.state in AT_WORK}
        left = {row["worker"]: row for row in _events(rows, "left")}
        for unit in [u for u in self._starting if at_work.keys() >= set(u.workers)]:
            self._starting.remove(unit)
            where = ", ".join(
                f"{w} (pid {at_work[w].pid} on {at_work[w].host})" for w in unit.workers
            )
            self._say(f"{unit.name} runs: {where}")
        for unit in [u for u in self._draining if left.keys() >= set(u.workers)]:
            self._draining.remove(unit)
            late = [w for w in unit.workers if left[w].get("killed")]
            self._say(f"{unit.name} has left" + (f"; killed: {', '.join(late)}" if late else ""))

    def _left(self) -> str:
        pending = [f"{_names(self._starting)} started"] if self._starting else []
        pending += [f"{_names(self._draining)} left"] if self._draining else []
        return " and ".join(pending)


def _events(rows: Sequence[dict[str, Any]], event: str) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row.get("event") == event)


def _names(some: Sequence[Unit]) -> str:
    return ", ".join(unit.name for unit in some)
