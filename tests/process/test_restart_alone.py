"""A real supervisor, real workers with their heartbeat processes, a store in a folder: one is killed and
one is stopped, and each time a new process registers in its place while the others go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from history_check import check_history, read_history

from experiments.ppo_math import ppo_math
from launcher.trials.status import trial_view
from realsys.api.cluster import ClusterSpec
from realsys.api.plan import LaunchPlan, PhasePlan, plan_hash, plan_text
from realsys.api.scheduling import Scheduling, TasksGroup
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import NameResolve
from realsys.observability.jsonl import read_jsonl
from realsys.supervisor.attempt.attempt import Job, claim_attempt
from realsys.supervisor.steps.local_steps import LocalSteps
from realsys.supervisor.supervisor import Supervisor
from realsys.trial.records import (
    Result,
    TrialFiles,
    WorkerRecord,
    WorkerStatus,
    loads,
    process_start,
)

SERVER, MASTER, MODEL = "generation_server/1", "master_worker/0", "model_worker/0"
ROLES = Path(__file__).with_name("restarted_roles.py")


def plan_of(root: Path) -> LaunchPlan:
    """A master, a model worker and two generation servers on this machine."""
    experiment = ppo_math()
    groups = experiment.scheduling_setup()
    two = TasksGroup(count=2, scheduling=Scheduling())
    phase = PhasePlan(
        name="main",
        experiment_name="ppo-math",
        folder=str(root / "run1"),
        publish=None,
        scheduling=replace(groups, generation_server=two),
        config=experiment.initial_setup().lazy_init().set_worker_information("ppo-math", "run1"),
    )
    site = ClusterSpec(
        name="here",
        scheduler="local",
        file_root=str(root),
        name_resolve=f"file://{root}/store",
        env_vars={"REALSYS_STALL_FLOOR_S": "1"},
    )
    return LaunchPlan(
        experiment_name="ppo-math",
        trial_name="run1",
        user="anna",
        trial_dir=str(root / "run1"),
        cluster=site,
        phases=(phase,),
        imports=(str(ROLES),),
    )


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)
    return found


class Scenario(threading.Thread):
    """What happens to the trial, in a thread: the supervisor must run in the main one."""

    def __init__(self, files: TrialFiles, store: NameResolve, keys: TrialKeys) -> None:
        super().__init__()
        self.files, self.store, self.keys = files, store, keys
        self.pids: list[dict[str, int]] = []
        self.rows: list[str] = []
        self.error: BaseException | None = None

    def registered(self) -> dict[str, int]:
        entries = self.store.get_subtree(self.keys.workers)
        records = [loads(WorkerRecord, entry.value, where=entry.key) for entry in entries]
        return {record.worker: record.pid for record in records}

    def run(self) -> None:
        try:
            self._play()
        except BaseException as error:  # outermost frame of the thread: the test raises it
            self.error = error
        (self.files.root / "finish").touch()

    def _until_pace_known(self) -> None:
        """A worker whose steps are not known may stand still for half an hour."""

        def step() -> int:
            kind, _, index = SERVER.partition("/")
            entry = self.store.get(self.keys.worker_status(kind, int(index)))
            return loads(WorkerStatus, entry.value, where=entry.key).step

        until(lambda: step() == 5, "it has told five steps")

    def _play(self) -> None:
        self.pids.append(until(lambda: (p := self.registered()) and len(p) == 4 and p, "all there"))
        self._until_pace_known()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            old = self.pids[-1][SERVER]
            os.kill(old, number)
            new = until(lambda old=old: self.registered().get(SERVER) not in (None, old), "anew")
            assert new
            self._until_pace_known()
            self.pids.append(self.registered())
            assert process_start(old) is None, "two at a time"
        view = trial_view(self.files)
        self.rows = [f"{w.worker} {w.state} {w.restarts}" for w in view.workers]


def test_a_server_that_is_killed_and_one_that_is_stopped_are_started_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    files = TrialFiles(Path(plan.trial_dir))
    files.root.mkdir()
    files.plan.write_text(plan_text(plan))
    store, keys = open_store(plan.name_resolve_url), TrialKeys.of(plan)
    attempt, attempt_files = claim_attempt(files, store, keys, job=Job())
    hashed = plan_hash(plan_text(plan))
    steps = LocalSteps(plan, hashed, attempt_files)
    supervisor = Supervisor(plan, hashed, attempt, files, attempt_files, store, keys, steps)
    scenario = Scenario(files, store, keys)
    scenario.start()
    marker = supervisor.run()
    scenario.join()
    store.close()
    log = attempt_files.log(SERVER).read_text()
    assert scenario.error is None, (scenario.error, log)
    assert (marker.result, marker.first_failure) == (Result.COMPLETED, None), log
    first, second, third = scenario.pids
    others = {MASTER, MODEL, "generation_server/0"}
    assert all(first[w] == second[w] == third[w] for w in others)
    assert len({first[SERVER], second[SERVER], third[SERVER]}) == 3
    assert scenario.rows == [
        "generation_server/0 running 0",
        "generation_server/1 running 2",
        "model_worker/0 running 0",
        "master_worker/0 running 0",
    ]
    killed, stopped = read_jsonl(attempt_files.restarts)
    assert killed["why"].startswith("killed by SIGKILL (signal 9)")
    assert stopped["why"].startswith("stalled: ")
    assert stopped["why"].endswith("stopped by SIGSTOP")
    assert [row["pid"] for row in (killed, stopped)] == [first[SERVER], second[SERVER]]
    assert log.count("registered control=") == 3, "one log for all three"
    assert check_history(read_history(files.root)) == []
