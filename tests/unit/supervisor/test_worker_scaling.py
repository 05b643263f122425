"""The supervisor starts workers that are added and sees off those that are to go; the trial goes on.

With the trial of test_worker_restarts.py: real processes of the local steps, which are shell scripts.
"""

from __future__ import annotations

import json
from typing import Any

import golden
import pytest
from stand_in_slurm import wait_until
from test_worker_restarts import SERVER, Trial, is_running
from test_worker_restarts import trial as trial

from realsys.api.errors import ClusterError
from realsys.supervisor.scaling import worker_scaling
from realsys.supervisor.steps import local_steps
from realsys.supervisor.steps.local_steps import LocalSteps
from realsys.trial.records import Result, dumps
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
