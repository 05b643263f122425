"""Whose request ends a run, and what a poll of the workers' leases tells: on a store in memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realsys.api.errors import StoreUnavailable
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.supervisor.attempt import stop_watch
from realsys.supervisor.attempt.attempt import Job, claim_attempt
from realsys.supervisor.attempt.stop_watch import StopWatch
from realsys.supervisor.health import worker_leases
from realsys.supervisor.health.worker_leases import WorkerLeases
from realsys.trial.records import (
    AttemptRecord,
    StopRequest,
    TrialFiles,
    WorkerRecord,
    WorkerStatus,
    dumps,
    loads,
)

KEYS = TrialKeys(cluster="local", user="anna", experiment="ppo-math", trial="run1")
REQUEST = StopRequest(grace_seconds=5.0, by="eva", at=1.0, attempt=1)


class Polls:
    """Instead of a thread that polls: reads when it is looked at. ``asked`` are the periods."""

    asked: list[float]

    def __init__(self, read: Any, *, every_s: float, name: str) -> None:
        self.read, self.is_stopped = read, False
        self.asked.append(every_s)

    def start(self) -> Polls:
        return self

    def stop(self) -> None:
        self.is_stopped = True

    def latest(self) -> Any:
        try:
            value = self.read()
        except StoreUnavailable:
            value = None
        return SimpleNamespace(value=value, asked_s=self.now_s, answered_s=self.now_s + 0.5)

    now_s = 0.0


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, AttemptRecord]:
    Polls.asked = []
    for module in (stop_watch, worker_leases):
        monkeypatch.setattr(module, "StorePoller", Polls)
    (tmp_path / "run1").mkdir()
    store = open_store(f"memory://{tmp_path}")
    return store, claim_attempt(TrialFiles(tmp_path / "run1"), store, KEYS, job=Job())[0]


def test_only_a_request_for_this_attempt_ends_it(
    world: tuple[Any, AttemptRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, attempt = world
    clock = SimpleNamespace(now_s=100.0, time=lambda: 9.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(stop_watch, "time", clock)
    watch = StopWatch(store, KEYS, attempt)
    watch.start()
    for value in (None, b"nul", dumps(replace(REQUEST, attempt=2))):
        if value is not None:
            store.add(KEYS.stop, value, replace=True)
        watch.poll()
        assert (watch.is_requested, watch.is_over, watch.requested_by) == (False, False, "")
    opened: Any = watch._watch
    store.add(KEYS.stop, dumps(REQUEST), replace=True)
    watch.poll()
    assert (watch.is_requested, watch.is_over, watch.requested_by) == (True, False, "eva")
    assert watch._watch is opened  # one for all polls
    store.add(KEYS.stop, dumps(replace(REQUEST, by="another", grace_seconds=900.0)), replace=True)
    clock.now_s = 105.0  # the grace period starts once
    watch.poll()
    assert (watch.is_over, watch.requested_by) == (False, "eva")
    assert not watch.request("SIGTERM", grace_s=1.0)  # it is being stopped
    clock.now_s = 105.1
    assert watch.is_over
    closed = list[str]()
    monkeypatch.setattr(opened, "close", lambda: closed.append("closed"))

    def fail(timeout_s: float) -> None:
        assert timeout_s == 0.0
        raise StoreUnavailable("no answer", where="store", fix="wait")

    monkeypatch.setattr(opened, "poll", fail)
    watch.poll()  # the watch is lost with the answer; the next poll opens another
    assert (closed, watch._watch) == (["closed"], None)
    watch.poll()
    again: Any = watch._watch
    monkeypatch.setattr(again, "close", lambda: closed.append("again"))
    watch.stop()
    assert (closed[1:], watch._poller.is_stopped) == (["again"], True)  # type: ignore[attr-defined]
    unasked = StopWatch(store, KEYS, attempt)
    unasked.start()
    unasked.stop()
    later = StopWatch(store, KEYS, attempt)  # begins when it has been asked for
    later.start()
    later.poll()
    assert later.is_requested
    store.delete(KEYS.stop)
    later.poll()
    assert later._newest is None


def test_a_signals_request_is_passed_on_once_unless_another_attempt_runs(
    world: tuple[Any, AttemptRecord],
) -> None:
    store, attempt = world
    watch = StopWatch(store, KEYS, attempt)
    watch.start()
    assert watch.request("SIGTERM", grace_s=7.0)
    assert not watch.request("SIGINT", grace_s=7.0)
    watch.poll()
    assert (watch.is_requested, watch.requested_by) == (True, "SIGTERM")
    passed = loads(StopRequest, store.get(KEYS.stop).value, where="")
    assert (passed.grace_seconds, passed.by, passed.attempt) == (7.0, "SIGTERM", 1)
    store.delete(KEYS.stop)
    watch.poll()
    assert KEYS.stop not in store.find_subtree(KEYS.root)
    late = StopWatch(store, KEYS, replace(attempt, token="of an older one"))
    late.start()
    late.request("SIGTERM", grace_s=7.0)
    late.poll()
    assert late.is_requested
    assert KEYS.stop not in store.find_subtree(KEYS.root)


@dataclass
class Task:
    worker: str
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


A, B = "model_worker/0", "model_worker/1"


def leases_of(world: tuple[Any, AttemptRecord], **more: Any) -> WorkerLeases:
    store, attempt = world
    return WorkerLeases(
        store, KEYS, attempt, **{"judges_leases": True, "has_left": lambda task: False, **more}
    )


def register(world: tuple[Any, AttemptRecord], worker: str, *, pid: int = 1, token: str = "",
             **status: Any) -> WorkerRecord:  # fmt: skip
    store, attempt = world
    kind, _, index = worker.partition("/")
    token = token or attempt.token
    record = WorkerRecord(worker=worker, host="n1", pid=pid, start=1, attempt=1, token=token)
    store.add(KEYS.worker(kind, int(index)), dumps(record), lease=store.grant(60.0), replace=True)
    told = WorkerStatus(**{"state": "running", "token": token, **status})
    store.add(KEYS.worker_status(kind, int(index)), dumps(told), replace=True)
    return record


def look(leases: WorkerLeases, *tasks: Task) -> list[str]:
    return [task.worker for task in leases.lost(tasks)]  # type: ignore[arg-type]


def test_with_thousands_of_workers_they_are_looked_at_less_often(
    world: tuple[Any, AttemptRecord],
) -> None:
    leases = leases_of(world)
    for number in (1, 1000, 2500):
        leases.begin_phase(number)
    assert Polls.asked == [1.0, 1.0, 2.5]
    poller: Any = leases._poller
    leases.end_phase()
    leases.end_phase()
    assert (look(leases, Task(A)), poller.is_stopped) == ([], True)


def test_a_phase_begins_without_the_workers_of_the_one_before(
    world: tuple[Any, AttemptRecord],
) -> None:
    leases = leases_of(world)
    leases.begin_phase(2)
    first = register(world, A, stalled_s=3.0)
    other = register(world, B)
    register(world, "model_worker/2", token="another attempt's", stalled_s=9.0)
    world[0].add(KEYS.worker("model_worker", 3), b"damaged")
    assert leases._read().leases.keys() == {A, B}
    world[0].add(KEYS.worker("model_worker", 0), dumps(first), replace=True)  # without a lease
    assert leases._read().leases.keys() == {B}
    assert look(leases, Task(A), Task(B)) == []
    assert leases.registered == {A: first, B: other}
    assert (set(leases.statuses), set(leases.stalled())) == ({A, B}, {A})
    leases.forget(A)
    leases.let_go(B)
    for _ in range(2):  # the former process's entries, and who may leave
        assert (leases.registered.get(A), leases.statuses) == (None, {})
        look(leases, Task(A), Task(B))
        leases.forget(A)
    again = register(world, A, pid=2)
    look(leases, Task(A))
    assert (leases.registered[A], set(leases.statuses)) == (again, {A})
    leases.forget(A)
    leases.begin_phase(2)
    assert (leases.registered, leases.statuses) == ({}, {})
    look(leases, Task(A), Task(B))
    assert leases.registered == {A: again, B: other}  # nobody is forgotten or let go any more


def test_nobody_is_lost_while_the_store_does_not_answer(
    world: tuple[Any, AttemptRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = leases_of(world)
    leases.begin_phase(1)
    register(world, A)

    def away(prefix: str) -> None:
        raise StoreUnavailable("no answer", where="store", fix="wait")

    for is_away in (False, True, False):
        with monkeypatch.context() as patched:
            if is_away:
                patched.setattr(world[0], "get_subtree", away)
            frozen = set[bool]()
            for _ in range(120):
                monkeypatch.setattr(Polls, "now_s", Polls.now_s + 1.0)
                assert look(leases, Task(A)) == []
                frozen.add(leases.is_frozen)
        assert leases.is_frozen is is_away
        assert leases.registered.keys() == leases.statuses.keys() == {A}


@pytest.mark.parametrize(
    ("judges", "left", "code", "lost"),
    [
        (True, False, None, [A]),
        (True, False, 0, []),
        (True, True, None, []),
        (False, False, None, []),
    ],
)
def test_whose_key_is_gone_is_lost_if_it_runs_and_has_not_left(
    world: tuple[Any, AttemptRecord], judges: bool, left: bool, code: int | None, lost: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    leases = leases_of(world, judges_leases=judges, has_left=lambda task: left)
    leases.begin_phase(2)
    register(world, A)
    register(world, B)
    found = list[str]()
    for now_s in range(0, 120, 1):
        monkeypatch.setattr(Polls, "now_s", float(now_s))
        if now_s == 2:
            world[0].delete(KEYS.worker("model_worker", 0))
        found += look(leases, Task(A, code if now_s >= 2 else None), Task(B))
    assert sorted(set(found)) == lost
    assert leases.looked_s == 119.0
    assert not leases.is_frozen
    assert not leases.left_unwell(A, left_s=1.0)
    register(world, A, state="lost")
    leases.look_now(timeout_s=60.0)
    assert leases.looked_s == pytest.approx(time.monotonic(), abs=600)
    assert leases.left_unwell(A, left_s=1.0)
    assert not leases.left_unwell(A, left_s=leases.looked_s + 1.0)
    assert not leases.left_unwell(B, left_s=1.0)
