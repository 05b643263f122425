"""The supervisor starts workers that are added and sees off those that are to go; the trial goes on.

With the trial of test_worker_restarts.py: real processes of the local steps, which are shell scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
from stand_in_slurm import wait_until
from test_worker_restarts import SERVER, Trial, is_running
from test_worker_restarts import trial as trial

from realsys.api.errors import ClusterError
from realsys.supervisor.scaling import worker_scaling
from realsys.supervisor.scaling.worker_scaling import WorkerScaling
from realsys.supervisor.steps import local_steps
from realsys.supervisor.steps.local_steps import LocalSteps
from realsys.trial.records import AttemptFiles, Result, dumps
from realsys.worker.live_scaling import Scaling, change_scaling, read_scaling

ADDED = "generation_server/1"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_scaling, "LOOK_S", 0.01)
    monkeypatch.setattr(worker_scaling, "TRY_AGAIN_S", 0.01)


def want(one: Trial, change: Any) -> None:
    change_scaling(one.store, one.keys, one.attempt, phase="main", change=change)


def add(one: Trial) -> int:
    """Has a server added; its pid."""
    one.workers.append(ADDED)
    want(one, lambda s: s.with_added({ADDED: SERVER}))
    return one.pid(ADDED)


def drain(one: Trial, worker: str, seconds: float = 60.0) -> None:
    want(one, lambda s: s.with_drained({worker: seconds}))


def events(one: Trial) -> list[tuple[str, str]]:
    path = one.files.scaling
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["event"], row["worker"]) for row in rows]


def test_a_worker_is_added_and_started_again_like_any_other(trial, monkeypatch):
    one = trial()
    asked: list[tuple[str, int, object]] = []

    def command(*, worker_type: str, index: int, like: object, **more: object) -> list[str]:
        asked.append((worker_type, index, like))
        return one.command(worker_type=worker_type, index=index)

    one.begin()
    monkeypatch.setattr(local_steps, "command", command)
    first = add(one)
    one.end(ADDED, 3)
    assert one.pid(ADDED, starts=2) != first
    assert asked == [("generation_server", 1, 0)] * 2
    assert one.finish().result is Result.COMPLETED
    assert events(one) == [("started", ADDED)]
    assert [row["worker"] for row in one.restarts()] == [ADDED]


@pytest.mark.parametrize("code", [0, 7], ids=["well", "badly"])
def test_one_that_is_to_go_may_end_as_it_likes(trial, code):
    one = trial().begin()
    add(one)
    drain(one, SERVER)
    wait_until(lambda: ("leaving", SERVER) in events(one))
    one.end(SERVER, code)
    wait_until(lambda: ("left", SERVER) in events(one))
    assert one.marker is None
    assert one.finish().result is Result.COMPLETED
    assert (len(one.pids(SERVER)), one.restarts()) == (1, [])


def test_one_that_does_not_leave_in_time_is_killed(trial, monkeypatch):
    monkeypatch.setattr(worker_scaling, "LEFT_LATE_S", 0.05)
    one = trial().begin()
    drain(one, SERVER, 0.05)
    wait_until(lambda: ("left", SERVER) in events(one))
    assert not is_running(one.pid(SERVER))
    (left,) = [
        r for r in map(json.loads, one.files.scaling.read_text().splitlines()) if "code" in r
    ]
    assert (left["code"], left["killed"]) == (-9, True)
    assert one.finish().result is Result.COMPLETED


def test_one_that_is_down_when_it_is_to_go_is_not_started_again(trial):
    one = trial(pause_s=600.0).begin()
    one.end(SERVER, 3)
    wait_until(lambda: one.supervisor.restarts.is_down(SERVER))
    drain(one, SERVER)
    wait_until(lambda: ("left", SERVER) in events(one))
    assert not one.supervisor.restarts.is_down(SERVER), "nobody waits to start it"
    assert one.finish().result is Result.COMPLETED
    assert (len(one.pids(SERVER)), one.restarts()) == (1, [])


def test_one_that_is_to_go_and_hangs_is_nobodys_fault(trial):
    one = trial().begin()
    one.register(SERVER, one.pid(SERVER))
    wait_until(lambda: SERVER in one.supervisor.leases.registered)
    drain(one, SERVER)
    wait_until(lambda: ("leaving", SERVER) in events(one))
    one.register(SERVER, one.pid(SERVER), stalled_s=500.0)
    one.register("model_worker/0", one.pid("model_worker/0"))
    wait_until(lambda: "model_worker/0" in one.supervisor.leases.registered)
    assert one.supervisor.leases.stalled() == {}
    assert one.finish().result is Result.COMPLETED


def test_an_added_worker_that_can_not_be_kept_is_let_go_and_the_trial_goes_on(trial):
    one = trial(max_restarts=1).begin()
    add(one)
    one.end(ADDED, 5, always=True)
    wait_until(lambda: ("left", ADDED) in events(one))
    told = [("started", ADDED), ("failed", ADDED), ("leaving", ADDED), ("left", ADDED)]
    assert events(one) == told
    wanted = read_scaling(one.store, one.keys, token=one.attempt.token)
    assert wanted is not None
    assert wanted.drained == {ADDED: 0.0}, "others hear of it"
    assert one.finish().result is Result.COMPLETED


def test_one_that_can_not_be_started_is_told_with_the_reason(trial, monkeypatch):
    one = trial().begin()

    def refuse(*args: object, **named: object) -> None:
        raise ClusterError("no GPU of the job is free", where="step", fix="let one go")

    monkeypatch.setattr(one.steps, "add", refuse)
    want(one, lambda s: s.with_added({ADDED: SERVER}))
    wait_until(lambda: ("left", ADDED) in events(one))
    row = json.loads(one.files.scaling.read_text().splitlines()[0])
    golden.check((row["event"], row["why"], row["fix"]))
    assert one.finish().result is Result.COMPLETED


def test_one_that_finds_no_place_waits_for_one_that_is_to_go(trial, monkeypatch):
    one, add_really, refusals = trial().begin(), LocalSteps.add, []

    def add_in_its_place(steps: object, worker: str, **named: Any) -> object:
        if not named["left"]:
            refusals.append(worker)
            raise ClusterError("no GPU of the job is free", where="step", fix="let one go")
        return add_really(one.steps, worker, **named)

    monkeypatch.setattr(LocalSteps, "add", add_in_its_place)
    one.workers.append(ADDED)
    want(one, lambda s: s.with_added({ADDED: SERVER}).with_drained({SERVER: 60.0}))
    wait_until(lambda: refusals)
    one.end(SERVER, 0)
    assert is_running(one.pid(ADDED))
    wait_until(lambda: len(events(one)) == 3)
    assert events(one) == [("leaving", SERVER), ("left", SERVER), ("started", ADDED)]


def test_what_was_wanted_of_another_attempt_or_phase_is_not_done(trial):
    one = trial().begin()
    for token, phase in (("theirs", "main"), (one.attempt.token, "prepare")):
        other = Scaling(attempt=1, token=token, phase=phase, drained={SERVER: 0.0})
        one.store.add(one.keys.scaling, dumps(other), replace=True)
    add(one)
    assert is_running(one.pid(SERVER))
    assert one.finish().result is Result.COMPLETED  # the worker may be there before the line is
    assert events(one) == [("started", ADDED)]


# ---- in virtual time ------------------------------------------------------------------------------

LIKE, DRAINS, NEVER = SERVER, "rollout_worker/0", "generation_server/7"


class World:
    """Steps, restarts, leases and clock of a scaling that are noted down; ``add`` may be refused."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_scaling, "time", self)
        monkeypatch.setattr(worker_scaling, "LOOK_S", 1.0)
        monkeypatch.setattr(worker_scaling, "StorePoller", self.poller)
        self.now_s, self.done, self.refused = 100.0, list[tuple[Any, ...]](), False
        self.optional, self.is_stopping, self.given_up = set[str](), False, set[str]()
        self.wanted: Scaling | None = Scaling(attempt=1, token="t", phase="main", by="eva")
        self.files = AttemptFiles(root / "0001")
        self.files.root.mkdir()
        self.tasks = [self.task(LIKE), self.task(DRAINS)]
        attempt, phase = SimpleNamespace(token="t"), SimpleNamespace(name="main")
        phase.config = SimpleNamespace(rollout=None)
        self.scaling: Any = WorkerScaling(
            self.files,
            None,
            None,
            attempt,
            self,
            self,
            lambda: self.is_stopping,  # type: ignore[arg-type]
        )
        self.scaling.begin_phase(phase)

    def poller(self, read: Any, **_: Any) -> Any:
        found = SimpleNamespace(latest=lambda: SimpleNamespace(value=self.wanted))
        found.stop = lambda: self.done.append(("stopped",))
        return SimpleNamespace(start=lambda: found)

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def let_go(self, worker: str) -> None:
        self.done.append(("let go", worker))

    def is_given_up(self, worker: str) -> bool:
        return worker in self.given_up

    @staticmethod
    def task(worker: str, code: int | None = None) -> Any:
        return SimpleNamespace(worker=worker, code=code, poll=lambda: code)

    def add(self, worker: str, *, like: Any, running: list[Any], left: list[Any]) -> Any:
        asked = ("add", worker, like.worker, [t.worker for t in running], [t.worker for t in left])
        self.done.append(asked)
        if self.refused:
            raise ClusterError("no place", where="n1", fix="wait")
        return self.task(worker)

    def kill(self, task: Any) -> None:
        self.done.append(("kill", task.worker))
        if self.refused:
            raise ClusterError("not now", where="n1", fix="wait")

    def advance(self, now_s: float) -> list[tuple[Any, ...]]:
        """What is done then."""
        self.now_s = now_s
        self.done.clear()
        self.scaling.advance(self.tasks, self)
        return self.done

    def rows(self) -> list[dict[str, Any]]:
        path = self.files.scaling
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_who_leaves_is_let_go_then_killed_once_and_its_end_is_no_failure(world):
    assert world.wanted is not None
    world.wanted = world.wanted.with_added({NEVER: LIKE}).with_drained({DRAINS: 10.0, NEVER: 5.0})
    assert world.advance(100.0) == [("let go", DRAINS)] * 2  # by restarts and leases
    assert world.scaling.is_leaving(DRAINS)
    assert not world.scaling.is_leaving(LIKE)
    assert world.advance(110.0 + 14.9) == []
    world.refused = True
    assert world.advance(110.0 + 15.0) == [("kill", DRAINS)]
    assert world.advance(200.0) == []
    world.tasks[1] = world.task(DRAINS, code=-9)
    for now_s in (201.0, 202.0):
        assert world.advance(now_s) == []
    told = {"worker": DRAINS, "at": 100.0}
    never, leaving, left = sorted(world.rows(), key=lambda row: (row["worker"], row["event"]))
    assert (never["worker"], never["event"], never["code"]) == (NEVER, "left", None)
    assert leaving == {**told, "event": "leaving", "seconds": 10.0, "by": "eva"}
    assert left == {**told, "at": 201.0, "event": "left", "code": -9, "killed": True}
    world.scaling.end_phase()
    assert world.done == [("stopped",)]


def test_one_that_finds_no_place_waits_for_who_leaves_and_is_given_up_otherwise(world, monkeypatch):
    published = list[Any]()

    def change(store: Any, keys: Any, attempt: Any, *, phase: str, change: Any) -> Scaling:
        published.append((phase, change(world.wanted).drained))
        world.wanted = change(world.wanted)
        return world.wanted

    monkeypatch.setattr(worker_scaling, "change_scaling", change)
    other = "generation_server/2"
    world.tasks.append(world.task(other))
    assert world.wanted is not None
    world.wanted = world.wanted.with_drained({other: 60.0}).with_added({ADDED: LIKE})
    world.refused = True
    asked = ("add", ADDED, LIKE, [LIKE, other], [])
    assert world.advance(100.0)[2:] == [asked]  # there may be a place when the other has left
    assert world.advance(100.9) == []
    assert world.advance(101.0) == [asked]
    world.tasks[2] = world.task(other, code=0)
    assert world.advance(101.5) == []
    assert world.advance(102.0) == [("add", ADDED, LIKE, [LIKE], [other])]
    assert published == [("main", {other: 60.0, ADDED: 0.0})]
    (failed,) = [row for row in world.rows() if row["event"] == "failed"]
    assert (failed["worker"], failed["why"], failed["fix"]) == (ADDED, "no place", "wait")
    world.refused = False
    assert world.advance(200.0) == []  # not tried again
    world.wanted = world.wanted.with_added({NEVER: LIKE})
    assert [kind for kind, *_ in world.advance(201.0)] == ["add"]
    assert (world.tasks[-1].worker, world.optional) == (NEVER, {NEVER})
    world.is_stopping, world.given_up = True, {NEVER}
    world.advance(202.0)
    assert len(published) == 1
    world.is_stopping = False
    world.advance(203.0)
    assert published[1] == ("main", {other: 60.0, ADDED: 0.0, NEVER: 0.0})
