"""Which workers are started again, and when: a policy in virtual time, and who counts as hanging."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import ClusterError
from realsys.api.scheduling import INDEPENDENTLY_RESTARTABLE, WorkerType
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.observability.history import Op
from realsys.runtime.worker_commands import Command, Verb
from realsys.runtime.worker_exit_codes import NOT_STARTED
from realsys.supervisor.attempt.attempt import Job, claim_attempt
from realsys.supervisor.health import worker_restarts
from realsys.supervisor.health.failure_report import FailureReporter
from realsys.supervisor.health.restarts import (
    RestartPolicy,
    Stalls,
    is_restarted_alone,
    judge_stalls,
)
from realsys.supervisor.health.worker_restarts import WorkerRestarts
from realsys.trial.records import Failure, TrialFiles, WorkerStatus, loads, write_record

SERVER, MANAGER, ROLLOUT = "generation_server/1", "gserver_manager/0", "rollout_worker/2"
MASTER, MODEL = "master_worker/0", "model_worker/0"
FAILURE = Failure(worker=SERVER, host="n2", pid=7, why="why", at=5.0)


def test_master_and_model_workers_end_the_trial():
    assert set(WorkerType) - INDEPENDENTLY_RESTARTABLE == {
        WorkerType.MASTER_WORKER,
        WorkerType.MODEL_WORKER,
    }
    assert [w for w in (SERVER, MANAGER, ROLLOUT, MASTER, MODEL) if is_restarted_alone(w)] == [
        SERVER,
        MANAGER,
        ROLLOUT,
    ]
    assert not is_restarted_alone("supervisor")


def test_pauses_grow_and_the_sixth_end_within_an_hour_is_the_last():
    policy, past_s, starts = RestartPolicy(), [], []
    now_s = 100.0
    while (start_s := policy.next_start_s(past_s, now_s=now_s)) is not None:
        starts.append(start_s - now_s)
        past_s.append(start_s)
        now_s = start_s + 1.0  # it lives for a second
    assert starts == [0.5, 1.0, 2.0, 4.0, 8.0]
    first_s = past_s[0]
    assert policy.next_start_s(past_s, now_s=first_s + 3599.0) is None
    assert policy.next_start_s(past_s, now_s=first_s + 3600.0) == first_s + 3600.0 + 8.0
    assert policy.next_start_s(past_s, now_s=now_s + 7200.0) == now_s + 7200.5  # long ago


def test_a_configuration_that_is_refused_at_the_first_start_is_not_tried_again():
    policy = RestartPolicy()
    assert policy.next_start_s([], now_s=9.0, kind="ConfigError") is None
    assert policy.next_start_s([], now_s=9.0, kind="ConfigErrors") is None
    assert policy.next_start_s([], now_s=9.0, kind="ClusterError") == 9.5
    assert policy.next_start_s([5.0], now_s=9.0, kind="ConfigError") == 10.0
    # One that has run for long took it before.
    assert policy.next_start_s([], now_s=5000.0, began_s=4500.0, kind="ConfigError") is None
    assert policy.next_start_s([], now_s=5000.0, began_s=4000.0, kind="ConfigError") == 5000.5


@given(
    lives_s=st.lists(st.integers(0, 4000), max_size=60),
    most=st.integers(1, 5),
    window_s=st.integers(10, 4000),
)
def test_it_is_started_again_while_fewer_than_allowed_were_in_the_window(lives_s, most, window_s):
    policy = RestartPolicy(max_restarts=most, window_s=window_s, first_pause_s=0.5)
    now_s, past_s = 0.0, []
    for life_s in lives_s:
        now_s += life_s
        start_s = policy.next_start_s(past_s, now_s=now_s)
        recent = sum(at_s > now_s - window_s for at_s in past_s)
        if start_s is None:
            assert recent == most
            return
        assert recent < most
        assert start_s == now_s + 0.5 * 2**recent
        past_s.append(start_s)
        now_s = start_s


def status(stalled_s: float = 0.0, waits_for: str = "", where: str = "") -> WorkerStatus:
    return WorkerStatus(
        state="running", stalled_s=stalled_s, waits_for=waits_for, stalled_where=where
    )


def test_a_server_that_hangs_is_started_again_and_who_waits_for_it_is_not_blamed():
    statuses = {
        SERVER: status(40.0, where="stopped by SIGSTOP"),
        ROLLOUT: status(35.0, waits_for=f"{SERVER}: tokens"),
        MASTER: status(),
    }
    assert judge_stalls(statuses, recovering=set()) == Stalls(again=(SERVER,))


def test_one_that_is_accused_by_who_waits_is_started_again():
    statuses = {ROLLOUT: status(35.0, waits_for=f"{MANAGER}: a server"), MANAGER: status()}
    assert judge_stalls(statuses, recovering=set()) == Stalls(again=(MANAGER,))


def test_a_model_worker_that_hangs_ends_the_trial_whoever_hangs_besides():
    statuses = {SERVER: status(40.0), MODEL: status(50.0)}
    assert judge_stalls(statuses, recovering=set()) == Stalls(fatal=True)
    assert judge_stalls({MODEL: status(50.0)}, recovering={SERVER}) == Stalls(fatal=True)


def test_who_waits_for_one_that_is_recovering_is_excused_also_at_second_hand():
    statuses = {
        MASTER: status(50.0, waits_for=f"{ROLLOUT}: samples"),
        ROLLOUT: status(40.0, waits_for=f"{SERVER}: tokens"),
    }
    assert judge_stalls(statuses, recovering={SERVER}) == Stalls()
    assert judge_stalls(statuses, recovering=set()) == Stalls(again=(ROLLOUT,))
    again = {**statuses, SERVER: status(60.0)}  # it hangs once more
    assert judge_stalls(again, recovering={SERVER}) == Stalls(again=(SERVER,))
    circle = {
        MASTER: status(50.0, waits_for=f"{ROLLOUT}: samples"),
        ROLLOUT: status(40.0, waits_for=f"{MASTER}: weights"),
    }
    assert judge_stalls(circle, recovering={SERVER}).fatal


def test_nobody_stands_still():
    assert judge_stalls({MASTER: status(), SERVER: status()}, recovering=set()) == Stalls()


def test_a_rank_in_a_collective_is_not_blamed_while_another_computes():
    """In the first steps, whose length nobody knows: one rank is done in ten minutes, one in twelve."""
    where = "all_reduce (torch/distributed/distributed_c10d.py:2501) < step (engine.py:88)"
    waits = WorkerStatus(state="running", stalled_s=700.0, stalled_where=where)
    works = WorkerStatus(state="running")
    assert judge_stalls({MODEL: waits, "model_worker/1": works}, recovering=set()) == Stalls()
    idle = WorkerStatus(state="ready")
    assert judge_stalls(
        {MODEL: waits, "model_worker/1": idle, MASTER: works}, recovering=set()
    ).fatal
    assert judge_stalls({MODEL: waits, "model_worker/1": waits}, recovering=set()).fatal
    elsewhere = WorkerStatus(state="running", stalled_s=700.0, stalled_where="loop (reward.py:7)")
    assert judge_stalls({MODEL: elsewhere, "model_worker/1": works}, recovering=set()).fatal
    both = {MODEL: waits, "model_worker/1": works, "model_worker/2": elsewhere}
    assert judge_stalls(both, recovering=set()).fatal
    too_long = WorkerStatus(state="running", stalled_s=1800.0, stalled_where=where)
    assert judge_stalls({MODEL: too_long, "model_worker/1": works}, recovering=set()).fatal
    one_of_two = {MODEL: too_long, "model_worker/1": waits, "model_worker/2": works}
    assert judge_stalls(one_of_two, recovering=set()).fatal


# ---- what is done about it ------------------------------------------------------------------------


class World:
    """What a supervisor's restarts act on, noted down: steps, store, leases, history, clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.now_s, self.done, self.is_stopping = 1000.0, list[tuple[str, str]](), False
        monkeypatch.setattr(worker_restarts, "time", self)
        (root / "run1").mkdir()
        files = TrialFiles(root / "run1")
        keys = TrialKeys(cluster="c", user="u", experiment="e", trial="t")
        self.store = open_store(f"memory://{root}")
        attempt, of_attempt = claim_attempt(files, self.store, keys, job=Job())
        self.leases: Any = SimpleNamespace(
            registered={}, statuses={}, forget=lambda w: self.done.append(("forget", w))
        )
        history: Any = SimpleNamespace(note=lambda op, worker: self.done.append((op.name, worker)))
        self.restarts = WorkerRestarts(
            self, of_attempt, self.store, keys, attempt, self.leases, history,  # type: ignore[arg-type]
            FailureReporter(attempt, of_attempt), lambda: self.is_stopping, **more,
        )  # fmt: skip
        self.restarts.begin_phase()
        self.files, self.keys = of_attempt, keys

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def kill(self, task: Any) -> None:
        self.done.append(("kill", task.worker))

    def restart(self, task: Any) -> Any:
        self.done.append(("restart", task.worker))
        return of(task.worker)

    def advance(self, *tasks: Any, now_s: float) -> list[Failure]:
        self.now_s = now_s
        return self.restarts.advance(list(tasks))


def of(worker: str, code: int | None = None, **more: Any) -> Any:
    """A task, that runs unless it has a code."""
    known = {"host": "n2", "pid": 7, "ended_at": None, "hint": "", **more}
    return SimpleNamespace(worker=worker, code=code, poll=lambda: code, **known)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_one_that_hangs_writes_its_stacks_before_it_is_killed_and_started_again(world):
    world.leases.statuses = {SERVER: status(40.0, where="loop (a.py:7)"), ROLLOUT: status()}
    server, tasks = of(SERVER), [of(SERVER), of(ROLLOUT)]
    assert not world.restarts.take_hung([of(SERVER, code=1)])  # of a step that is over
    assert world.restarts.take_hung([*tasks[1:], server])
    command = world.keys.command("generation_server", 1)
    assert loads(Command, world.store.get(command).value, where="").verb is Verb.DUMP
    assert len(world.store.find_subtree(world.keys.commands)) == 1
    assert (world.restarts.is_down(SERVER), world.restarts.is_given_up(SERVER)) == (True, False)
    assert world.restarts.take_hung(tasks)  # it is down already
    assert world.advance(server, now_s=1001.9) == []
    assert world.done == [("LOST", SERVER)]
    for now_s in (1002.0, 1032.0):
        assert world.advance(server, now_s=now_s) == []
        assert world.done[1:] == [("kill", SERVER)]
    world.is_stopping = True
    assert world.advance(server, now_s=1032.1) == []
    world.is_stopping = False
    (failure,) = world.advance(server, now_s=1032.1)  # nobody sees it end
    assert "30 s" in failure.why
    assert not world.restarts.is_down(SERVER)
    world.leases.statuses = {MODEL: status(40.0)}
    assert not world.restarts.take_hung([of(MODEL)])


def test_one_that_is_lost_is_killed_at_once(world):
    server = of(SERVER)
    assert world.restarts.take(server, Op.LOST)
    assert world.advance(server, now_s=1000.0) == []
    assert world.done == [("LOST", SERVER), ("kill", SERVER)]


def test_one_that_ended_is_started_again_after_a_pause_and_counted(world):
    ended = of(SERVER, code=3)
    failure = replace(FAILURE, worker=SERVER)
    assert world.restarts.with_restart_count(failure) == failure
    for number, (now_s, pause_s) in enumerate([(1000.0, 0.5), (1700.0, 1.0)], 1):
        world.now_s = now_s
        write_record(world.files.failure_record(SERVER), failure)
        tasks = [of(ROLLOUT), ended]
        assert world.restarts.take(ended, Op.EXITED)
        assert world.advance(*tasks, now_s=now_s + pause_s - 0.1) == []
        world.done.clear()
        world.now_s += 0.1
        assert world.restarts.advance(tasks) == []
        assert (tasks[1].poll(), world.restarts.is_down(SERVER)) == (None, False)
        assert world.done == [("forget", SERVER), ("restart", SERVER), ("RESTARTED", SERVER)]
        assert not world.files.failure_record(SERVER).exists()
        told = world.restarts.with_restart_count(failure).why
        assert told.startswith("why (")
        assert told.endswith(f" {number} time{'s' * (number > 1)})")
    rows = [json.loads(line) for line in world.files.restarts.read_text().splitlines()]
    assert [(r["worker"], r["number"], r["why"], r["ended_at"], r["at"]) for r in rows] == [
        (SERVER, 1, "why", 5.0, 1000.5), (SERVER, 2, "why", 5.0, 1701.0)
    ]  # fmt: skip
    for now_s, recent in ((1701.0 + 599.9, {SERVER}), (1701.0 + 600.0, set())):
        world.now_s = now_s
        assert world.restarts.recovering() == recent
    assert not world.restarts.take(of(MODEL, code=3), Op.EXITED)


@pytest.mark.parametrize("worker", [SERVER, "evaluator/0"])
def test_one_that_can_not_be_started_ends_the_trial_unless_that_can_do_without_it(world, worker):
    refused = of(worker, code=NOT_STARTED, hint="srun ended with 1")
    is_optional = worker != SERVER
    assert world.restarts.take(refused, Op.EXITED) is is_optional
    assert world.restarts.is_given_up(worker) is is_optional
    world.is_stopping = True
    assert world.restarts.take(refused, Op.EXITED)  # it is left as it is
    world.is_stopping = False
    world.restarts.begin_phase()
    assert not world.restarts.is_down(worker)
    world.restart = failing  # type: ignore[method-assign]
    ended = of(worker, code=3)
    assert world.restarts.take(ended, Op.EXITED)
    failures = world.advance(ended, now_s=2000.0)
    assert [(f.worker, "no place" in f.why, f.fix) for f in failures] == (
        [] if is_optional else [(worker, True, "wait")]
    )
    assert world.restarts.is_given_up(worker) is is_optional
    world.restarts.optional.add(SERVER)
    world.restarts.let_go(worker)
    assert not world.restarts.is_down(worker)
    world.restarts.begin_phase()
    assert world.restarts.optional == set()


def failing(task: Any) -> None:
    raise ClusterError("no place for it", where="n2", fix="wait")
