"""How often a run's progress becomes a write of the store: at a new step, and else once a second."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_slurm import wait_until

from realsys.api.errors import RealsysError, StaleAttempt, StoreError, StoreUnavailable
from realsys.heartbeat.heartbeat_process import _urgent_part
from realsys.master import run_progress
from realsys.master.run_progress import ProgressBoard
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
from realsys.name_resolve.store import find
from realsys.trial.records import AttemptRecord, Progress, WorkerStatus, dumps, loads

KEYS = TrialKeys(cluster="here", user="anna", experiment="ppo-math", trial="run1")
ATTEMPT = AttemptRecord(
    number=1, token="ours", host="here", supervisor_pid=1, supervisor_start=1, started_at=0.0
)


def make_board(store: MemoryStore) -> ProgressBoard:
    store.add(KEYS.attempt, dumps(ATTEMPT))
    phase = SimpleNamespace(name="main")
    runner = SimpleNamespace(store=store, keys=KEYS, attempt=ATTEMPT, phase=phase)
    return ProgressBoard(runner, total_steps=10)  # type: ignore[arg-type]


def told(store: MemoryStore) -> Progress:
    return loads(Progress, store.get(KEYS.progress).value, where="")


def test_calls_that_come_and_go_are_not_a_write_each_but_a_step_is_urgent_part() -> None:
    store = MemoryStore()
    board = make_board(store)
    before, began_s = store.revision(), time.monotonic()
    for step in range(1, 4):
        for i in range(100):
            board.call_changed(f"call{i}", ("model_worker/0",))
            board.call_changed(f"call{i}", ())
            time.sleep(0.001)
        board.step_done(step, epoch=0, seconds=0.1, tokens_per_s=1.0)
        board.publish()
        wait_until(lambda step=step: told(store).step == step)
    board.call_changed("last", ("model_worker/0",))
    wait_until(lambda: told(store).running == {"last": "model_worker/0"})
    seconds = time.monotonic() - began_s
    assert store.revision() - before <= 3 + 2 + seconds  # steps, the first and the last word
    board.publish("done")
    board.close()
    assert told(store).doing == "done"


def test_a_record_tells_all_that_is_known() -> None:
    store = MemoryStore()
    board = make_board(store)
    board.publish("loading")
    wait_until(lambda: find(store, KEYS.progress))
    nothing = Progress(attempt=1, phase="main", step=0, total_steps=10, doing="loading")
    began_s = told(store).updated_at
    assert told(store) == replace(nothing, updated_at=began_s)
    assert began_s == pytest.approx(time.time(), abs=600)
    board.step_done(2, epoch=1, seconds=4.0, tokens_per_s=7.0)
    board.step_done(3, epoch=1, seconds=2.0, tokens_per_s=8.0)
    board.headline = {"reward": 0.5}
    board.call_changed("gen", ("model_worker/0", "model_worker/1"))
    board.call_changed("rew", ("model_worker/2",))
    board.call_changed("rew", ())
    board.close()
    assert replace(told(store), updated_at=0.0) == Progress(
        attempt=1,
        phase="main",
        step=3,
        total_steps=10,
        epoch=1,
        step_seconds=pytest.approx(3.8),  # a tenth of the newest
        eta_seconds=pytest.approx(7 * 3.8),
        tokens_per_second=8.0,
        running={"gen": "model_worker/0, model_worker/1"},
        headline={"reward": 0.5},
    )


class AwayStore(MemoryStore):
    """Fails all writes while ``error`` is set, and counts them."""

    error: RealsysError | None = None
    tries = 0

    def transaction(self, *args: Any, **kwargs: Any) -> bool:
        self.tries += 1
        if self.error is not None:
            raise self.error
        return super().transaction(*args, **kwargs)

    def fails_several_times(self, error: RealsysError) -> None:
        before, self.error = self.tries, error
        wait_until(lambda: self.tries >= before + 3)
        self.error = None


def test_the_newest_is_told_when_the_store_is_back_and_each_outage_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for pause in ("RETRY_S", "LAZY_S"):
        monkeypatch.setattr(run_progress, pause, 0.001)
    store = AwayStore()
    board = make_board(store)
    for step in (1, 2):
        store.error = StoreUnavailable("no route", where="etcd", fix="wait")
        board.step_done(step, epoch=0, seconds=1.0, tokens_per_s=1.0)
        board.publish()
        store.fails_several_times(store.error)
        wait_until(lambda step=step: find(store, KEYS.progress) and told(store).step == step)
    assert len(caplog.records) == 2
    store.error = StoreUnavailable("no route", where="etcd", fix="wait")
    board.publish("older")
    tries = store.tries
    wait_until(lambda: store.tries > tries + 1)
    board.publish("newest")
    board.close()
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_a_store_that_refuses_costs_the_view_and_another_attempt_ends_it() -> None:
    store = AwayStore()
    board = make_board(store)
    store.error = StoreError("too large", where="etcd", fix="none")
    board.publish("refused")
    wait_until(lambda: store.tries == 1)
    store.error = None
    board.publish("told")
    wait_until(lambda: find(store, KEYS.progress) and told(store).doing == "told")
    theirs = replace(ATTEMPT, number=2, token="theirs")
    store.add(KEYS.attempt, dumps(theirs), replace=True)
    board.publish("stale")
    wait_until(lambda: not any(thread.name == "progress" for thread in threading.enumerate()))
    with pytest.raises(StaleAttempt):
        board.publish()
    assert told(store).doing == "told"


def test_what_a_worker_computes_can_wait_and_what_others_wait_for_can_not() -> None:
    ready = WorkerStatus(state="ready", step=3)
    for later in (
        WorkerStatus(state="running", mfc="actor_gen", step=3),
        WorkerStatus(state="running", mfc="actor_train", step=4, waits_for="model_worker/1"),
    ):
        assert _urgent_part(later) == _urgent_part(ready)
    for urgent in (
        WorkerStatus(state="paused", step=3),
        WorkerStatus(state="failed", step=3, reason="out of memory"),
        WorkerStatus(state="ready", step=3, last_command="7"),
        WorkerStatus(state="running", step=3, stalled_s=31.0),
    ):
        assert _urgent_part(urgent) != _urgent_part(ready)
