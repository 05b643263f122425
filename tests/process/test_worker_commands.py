"""Workers of a real trial: who holds the store, and commands that take effect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from real_trials import (
    LONG_PPO,
    SMALL_PPO,
    SMALL_PPO_STEPS,
    Trials,
    explain,
    kill_everything,
    metrics_of,
    worker_pid,
)

from realsys.api.plan import read_plan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.runtime.worker_commands import Command, Verb
from realsys.trial.liveness import processes_of
from realsys.trial.records import AttemptRecord, TrialFiles, WorkerStatus, dumps, loads
from realsys.trial.trial_state import State


class Steered:
    """A running trial's model worker, by way of its keys."""

    def __init__(self, trials: Trials, files: TrialFiles) -> None:
        self.trials, self.files = trials, files
        plan = read_plan(files.plan)
        self.store, self.keys = open_store(plan.name_resolve_url), TrialKeys.of(plan)
        entry = self.store.get(self.keys.attempt)
        self.attempt = loads(AttemptRecord, entry.value, where=entry.key)

    @property
    def status(self) -> WorkerStatus:
        key = self.keys.worker_status("model_worker", 0)
        return loads(WorkerStatus, self.store.get(key).value, where=key)

    def order(self, verb: Verb, **args: str) -> WorkerStatus:
        """Sends a command; returns the status that answers it."""
        command = Command(
            id=f"{verb}-{time.monotonic_ns()}",
            verb=verb,
            by="test",
            at=time.time(),
            attempt=self.attempt.number,
            token=self.attempt.token,
            args=args,
        )
        self.store.add(self.keys.command("model_worker", 0), dumps(command), replace=True)
        return self.until(lambda status: status.last_command == command.id)

    def tell(self, *words: str) -> tuple[int, str, str]:
        """`realsys tell`: status, what it prints, the last line that it says."""
        done = self.trials.run("tell", "ppo-math/run", "model_worker/0", *words)
        return done.returncode, done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]

    def until(
        self, condition: Callable[[WorkerStatus], bool], within_s: float = 240
    ) -> WorkerStatus:
        deadline_s = time.monotonic() + within_s
        while not condition(status := self.status):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.05)
        return status

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def steered(trials: Trials, tiny_policy: Path) -> Iterator[Any]:
    files = trials.launch("ppo-math", "run", f"actor.path={tiny_policy}", *LONG_PPO)
    trials.wait_for_step(files, 2)
    with closing(Steered(trials, files)) as made:
        yield made


def open_files(pid: int) -> set[str]:
    return {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}


def watches(pid: int, worker: int) -> bool:
    """Whether it is a heartbeat process that holds that worker's pidfd (proc_pid_fdinfo(5))."""
    with suppress(OSError):
        if b"realsys.heartbeat.heartbeat_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            infos = [p.read_text() for p in Path(f"/proc/{pid}/fdinfo").iterdir()]
            return any(f"\nPid:\t{worker}\n" in info for info in infos)
    return False


def test_a_model_worker_has_no_store_of_its_own(steered: Steered) -> None:
    view = steered.trials.wait_for_step(steered.files, 3)
    store = str(steered.trials.file_root / "name_resolve")
    assert any(name.startswith(store) for name in open_files(worker_pid(view, "master_worker/0")))
    pid = worker_pid(view, "model_worker/0")
    assert not any(name.startswith(store) for name in open_files(pid))
    heartbeats = [p.pid for p in processes_of(steered.files.root) if watches(p.pid, pid)]
    assert any(name.startswith(store) for one in heartbeats for name in open_files(one))


def test_a_worker_is_paused_configured_dumped_and_goes_on(steered: Steered) -> None:
    assert steered.tell("pause") == (0, "", "model_worker/0 is paused")
    assert steered.status.state == "paused"
    assert steered.tell("configure", "log_level=debug")[0] == 0
    assert steered.tell("configure", "log_level=loud")[0] != 0
    code, path, _ = steered.tell("dump")
    assert (code, path) == (0, str(steered.files.attempt(1).stacks_of("model_worker/0")))
    assert "between_requests" in Path(path).read_text()
    step, told = None, steered.trials.wait_for_step(steered.files, 2).step
    until_s = time.monotonic() + 240
    while step != told:  # what it had done before may be told a little later
        assert time.monotonic() < until_s, "it goes on"
        step = told
        time.sleep(2)
        told = steered.trials.wait_for_step(steered.files, 2).step
    assert steered.tell("resume")[0] == 0
    steered.trials.wait_for_step(steered.files, (step or 0) + 2)


def test_an_interrupted_worker_leaves_after_its_request(steered: Steered) -> None:
    steered.order(Verb.INTERRUPT)
    view = steered.trials.wait(steered.files, timeout_s=120)
    assert view.state is State.STOPPED, explain(steered.files, view)
    assert steered.status.state == "done"


def test_what_nobody_understands_is_told_at_once(steered: Steered) -> None:
    for words, wanted in (
        (("model_worker/9", "pause"), "no worker 'model_worker/9'"),
        (("model_worker/0", "puase"), "did you mean 'pause'?"),
        (("model_worker/0", "configure", "debug"), "'debug' is not an argument: it has no '='"),
    ):
        done = steered.trials.run("tell", "ppo-math/run", *words)
        assert done.returncode == 4, done.stderr
        assert wanted in done.stderr
    kill_everything(steered.files)
    done = steered.trials.run("tell", "ppo-math/run", "model_worker/0", "pause")
    assert done.returncode != 0
    assert "trial accept commands" in done.stderr


def test_a_whole_run_ends_with_a_goodbye_of_everybody(trials: Trials, tiny_policy: Path) -> None:
    files = trials.launch("ppo-math", "run", f"actor.path={tiny_policy}", *SMALL_PPO)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert metrics_of(files)[-1]["step"] == SMALL_PPO_STEPS
    with closing(Steered(trials, files)) as done:
        assert done.status.state == "done"
        assert done.store.find_subtree(done.keys.workers) == []
        statuses = done.store.get_subtree(done.keys.worker_statuses)
        assert {entry.lease_id for entry in statuses} == {None}
