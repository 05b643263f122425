"""A worker whose lease has ended, though nobody saw its process end, is lost; who left is not."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from stand_in_slurm import make_plan, wait_until, write_plan

from realsys.api.errors import StoreUnavailable
from realsys.api.trial import (
    ExitMarker,
    Result,
    WorkerExit,
    WorkerRecord,
    dumps,
    write_record,
)
from realsys.name_resolve.open import open_store
from realsys.supervisor import supervisor as supervisor_module
from realsys.supervisor.attempt import Job, take_attempt
from realsys.supervisor.supervisor import Supervisor
from realsys.worker.runner import trial_keys

MASTER, FIRST, SECOND = "master_worker/0", "model_worker/0", "model_worker/1"


@dataclass
class Task:
    """One that runs until the test says otherwise."""

    worker: str
    host: str = ""
    pid: int = 0
    ended_at: float | None = None
    hint: str = ""
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class Trial:
    """A supervisor in a thread, over three tasks that do nothing; and their leases."""

    def __init__(self, root: Path, *, local: bool = False) -> None:
        plan = make_plan(root)
        self.plan = replace(plan, job=None) if local else plan
        files = write_plan(self.plan)
        self.store, keys = open_store(self.plan.name_resolve_url), trial_keys(self.plan)
        self.keys = keys
        self.attempt, self.files = take_attempt(files, self.store, keys, job=Job())
        self.tasks = {
            MASTER: Task(MASTER, host="n1"),
            FIRST: Task(FIRST, host="n1"),
            SECOND: Task(SECOND),
        }
        self.ended: list[float] = []
        self.asked = 0
        self.store_answers = True
        self.supervisor = Supervisor(
            self.plan, "hash", self.attempt, files, self.files, self, keys, self
        )
        self.marker: ExitMarker | None = None
        self.leases = {worker: self._register(worker) for worker in self.tasks}
        self._thread = threading.Thread(target=self._run)

    def _register(self, worker: str, token: str = ""):
        kind, _, index = worker.partition("/")
        record = WorkerRecord(
            worker=worker,
            host=f"host-of-{worker.replace('/', '-')}",
            pid=70 + int(index),
            start=1,
            attempt=1,
            token=token or self.attempt.token,
        )
        lease = self.store.grant(60.0)
        key = self.keys.worker(kind, int(index))
        self.store.add(key, dumps(record), lease=lease, replace=True)
        return lease

    def register(self, worker: str, token: str = "") -> None:
        self.leases[worker] = self._register(worker, token)

    # ---- what the supervisor sees: a store, and steps

    def get_subtree(self, prefix: str):
        assert prefix == self.keys.workers
        self.asked += 1
        if not self.store_answers:
            raise StoreUnavailable("no answer", where="store", fix="wait")
        return self.store.get_subtree(prefix)

    def get(self, key: str):
        return self.store.get(key)

    def start(self, phase):
        return list(self.tasks.values())

    def end(self, tasks, *, grace_s: float) -> None:
        self.ended.append(grace_s)

    # ---- the test's side

    def _run(self) -> None:
        self.marker = self.supervisor.run()

    def begin(self) -> Trial:
        """Runs until the leases have been looked at."""
        self._thread.start()
        if self.plan.job is not None:
            self.look()
        return self

    def look(self, times: int = 2) -> None:
        """Until the supervisor has looked at the leases so often again."""
        wanted = self.asked + times
        wait_until(lambda: self.asked >= wanted or self.marker is not None)

    def outcome(self) -> ExitMarker:
        self._thread.join(10)
        assert self.marker is not None
        return self.marker

    def finish(self) -> ExitMarker:
        """The master is done, and everybody leaves."""
        done = self.files.root.parent.parent / "done.json"
        done.write_text(f'{{"token": "{self.attempt.token}"}}')
        for task in self.tasks.values():
            task.returncode = 0
        return self.outcome()


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, seconds in {
        "POLL_S": 0.005,
        "STOP_POLL_S": 5.0,
        "LEASE_POLL_S": 0.01,
        "LOST_S": 0.1,
        "LAST_WORDS_S": 0.02,
    }.items():
        monkeypatch.setattr(supervisor_module, name, seconds)
    made: list[Trial] = []

    def make(**changes) -> Trial:
        made.append(Trial(tmp_path, **changes))
        return made[-1]

    yield make
    for one in made:
        if one.marker is None:
            one.finish()
        one.store.close()


def test_a_worker_whose_lease_has_ended_fails_the_attempt_and_is_named(trial):
    one = trial().begin()
    one.leases[FIRST].revoke()
    marker = one.outcome()
    assert (marker.result, marker.phase, marker.other_failures) == (Result.FAILED, "main", ())
    first = marker.first_failure
    assert (first.worker, first.host, first.pid, first.kind) == (FIRST, "n1", 70, "")
    assert first.why == "its lease has ended: its node is lost or cut off, or it stands still"
    assert marker.resume == "realsys resume ppo-math/run1"
    assert one.ended == [supervisor_module.END_GRACE_S] * 2


def test_where_it_ran_is_known_from_its_registration_where_nobody_else_knows(trial):
    one = trial().begin()
    one.leases[SECOND].revoke()
    first = one.outcome().first_failure
    assert (first.worker, first.host, first.pid) == (SECOND, "host-of-model_worker-1", 71)


def test_all_that_were_lost_together_are_named(trial):
    one = trial().begin()
    one.leases[FIRST].revoke()
    one.leases[SECOND].revoke()
    marker = one.outcome()
    failures = [marker.first_failure, *marker.other_failures]
    assert sorted(failure.worker for failure in failures) == [FIRST, SECOND]


def test_a_lease_that_comes_back_in_time_is_no_loss(trial, monkeypatch):
    monkeypatch.setattr(supervisor_module, "LOST_S", 60.0)
    one = trial().begin()
    one.leases[FIRST].revoke()
    one.look()
    assert list(one.supervisor._gone_since_s) == [FIRST]
    one.register(FIRST)
    one.look()
    assert one.supervisor._gone_since_s == {}
    assert one.finish().result is Result.COMPLETED


def test_who_never_registered_is_not_missed(trial):
    one = trial()
    one.leases[SECOND].revoke()
    one.begin().look(20)
    assert one.marker is None
    assert one.finish().result is Result.COMPLETED


def test_the_registration_of_another_attempt_is_none(trial):
    one = trial().begin()
    one.leases[FIRST].revoke()
    one.register(FIRST, token="another")
    assert one.outcome().first_failure.worker == FIRST


def test_a_store_that_does_not_answer_loses_nobody(trial, caplog):
    one = trial().begin()
    one.store_answers = False
    one.leases[FIRST].revoke()
    one.look(20)
    time.sleep(0.15)  # longer than LOST_S
    assert one.marker is None
    assert set(caplog.messages) == {"leases not readable error=no answer"}
    assert one.finish().result is Result.COMPLETED


def test_a_task_that_is_known_to_have_ended_is_not_lost(trial):
    one = trial().begin()
    one.tasks[FIRST].returncode = 0
    one.leases[FIRST].revoke()
    one.look(20)
    time.sleep(0.15)
    assert one.marker is None
    assert one.finish().result is Result.COMPLETED


def test_a_task_that_left_well_is_not_lost_though_srun_does_not_say_so_yet(trial):
    one = trial().begin()
    told = WorkerExit(worker=FIRST, host="n1", pid=70, returncode=0, at=1.0)
    write_record(one.files.exit_of(FIRST), told)
    one.leases[FIRST].revoke()
    one.look(20)
    time.sleep(0.15)
    assert one.marker is None
    assert one.finish().result is Result.COMPLETED


def test_a_task_whose_end_is_seen_in_time_fails_for_its_own_reason(trial, monkeypatch):
    monkeypatch.setattr(supervisor_module, "LOST_S", 60.0)
    one = trial().begin()
    one.leases[FIRST].revoke()
    one.look()
    one.tasks[FIRST].hint = "srun: Killed on n1"
    one.tasks[FIRST].returncode = -9
    first = one.outcome().first_failure
    assert first.why == (
        "killed by SIGKILL (signal 9): by hand, or by the kernel when memory ran out (see dmesg) "
        "(srun: Killed on n1)"
    )


def test_a_local_run_never_asks_for_leases(trial):
    one = trial(local=True).begin()
    one.leases[FIRST].revoke()
    time.sleep(0.15)
    assert one.finish().result is Result.COMPLETED
    assert one.asked == 0
