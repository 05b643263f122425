"""How often a run's progress becomes a write of the store: at a new step, and else once a second."""

from __future__ import annotations

import time
from types import SimpleNamespace

from stand_in_slurm import wait_until

from realsys.heartbeat.heartbeat_process import _urgent_part
from realsys.master.run_progress import ProgressBoard
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.memory_store import MemoryStore
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
