"""An asynchronous trial on a real Slurm: a step for each kind of worker, one of them killed.

Between, it rests a while, and what its processes ask of the file system meanwhile is counted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

from file_calls import FileCalls, since, total
from real_trials import explain, small_ppo, trained_ids, wait_until, worker_pid
from slurm_trials import SlurmTrials

from realsys.observability.metrics import read_metrics
from realsys.trial.records import read_record
from realsys.trial.trial_state import State
from realsys.worker.task_place import TaskPlace

LONGER = small_ppo("exp_ctrl.total_train_epochs=3", "task.train_size=96")
PLUGIN = Path(__file__).parents[1] / "support" / "crawl_plugin.py"
CALLS_PER_S, FILES_PER_S = 20.0, 1.0  # of docs/reliability.md
OF_A_PROCESS_PER_S = 8.0  # a heartbeat makes 2, the supervisor 6
SETTLED_S = 15.0  # without a change, by when pauses have grown
COUNTED_S = 10.0


def assert_asks_little(calls: FileCalls) -> None:
    """Fails when the trial, which rests, asks more of its folder's file system than it may, or one of its
    processes polls."""
    time.sleep(SETTLED_S)
    before, began_s = calls.by_process(), time.monotonic()
    time.sleep(COUNTED_S)
    by_process, took_s = since(before, calls.by_process()), time.monotonic() - began_s
    told = {calls.program(pid)[-80:]: made for pid, made in by_process.items() if made.calls}
    assert total(by_process).writes > 0, "no lease was renewed: was anything counted?"
    assert total(by_process).calls / took_s <= CALLS_PER_S, told
    assert total(by_process).new_files / took_s <= FILES_PER_S, told
    assert max(made.calls for made in by_process.values()) / took_s <= OF_A_PROCESS_PER_S, told


def test_servers_and_rollout_workers_are_steps_and_a_killed_server_is_started_again(
    slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    """At rest it asks little of the file system, though most of its six workers have parents that look."""
    calls, go = FileCalls(slurm_trials.file_root, tmp_path / "scratch"), tmp_path / "go"
    slurm_trials.write_spec(setup=calls.setup)
    files = slurm_trials.launch(
        "ppo-math-async",
        "a",
        f"actor.path={tiny_policy}",
        "schedule.max_staleness=2",
        "schedule.servers=2",
        "scheduling.generation_server.gpu=0.5",
        *("--import", str(PLUGIN), "task.agent=crawl"),
        f"task.agent_args={{version: 4, go: {go}, slow_s: 3600}}",
        *LONGER,
    )
    slurm_trials.wait_for_step(files, 4, timeout_s=180)  # one server is enough for that
    view = wait_until(files, lambda v: all(w.pid for w in v.workers), timeout_s=120)
    first, second = (
        read_record(TaskPlace, files.attempt(1).place_of(f"generation_server/{i}"))
        for i in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.devices == second.devices != "", "they share a GPU"
    assert "," not in first.devices
    assert_asks_little(calls)
    go.touch()
    os.kill(worker_pid(view, "generation_server/1"), signal.SIGKILL)
    done = slurm_trials.wait(files, timeout_s=240)
    assert (done.state, done.attempt) == (State.COMPLETED, 1), explain(files, done)
    steps = [json.loads(line) for line in files.attempt(1).steps.read_text().splitlines()]
    kinds = Counter(row["step"] for row in steps)
    assert set(kinds) == {
        "generation_server",
        "gserver_manager",
        "model_worker",
        "master_worker",
        "rollout_worker",
    }
    assert kinds["generation_server"] == 2, "its first step, and one for the second start"
    assert set(Counter(trained_ids(files)).values()) == {1}
    assert len(trained_ids(files)) == 36 * 8
    rows = read_metrics(files.phase(files.root).metrics)
    lags = [row["actor/staleness/max"] for row in rows if row["step"]]
    assert max(map(float, lags)) <= 2
