"""A generation server that ends, hangs or is lost is started again by itself; the trial goes on.

Real processes of the local steps, whose command is a shell script of the test; the supervisor runs in a
thread. For workers whose end nobody sees, steps and tasks are played.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import golden
import pytest
from history_check import read_history
from stand_in_slurm import make_plan, wait_until, write_plan

from realsys.api.errors import ClusterError, KeyNotFound
from realsys.api.scheduling import Scheduling, TasksGroup
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.observability.history import Op
from realsys.runtime import worker_exit_codes
from realsys.supervisor import supervisor as supervisor_module
from realsys.supervisor.attempt.attempt import Job, claim_attempt
from realsys.supervisor.health import worker_leases, worker_restarts
from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.supervisor.health.restarts import RestartPolicy
from realsys.supervisor.steps import local_steps
from realsys.supervisor.steps.local_steps import LocalSteps
from realsys.supervisor.supervisor import Supervisor
from realsys.trial.records import (
    ExitMarker,
    Failure,
    Result,
    WorkerRecord,
    WorkerStatus,
    dumps,
    process_start,
    write_record,
)

MASTER, SERVER, EVALUATOR = "master_worker/0", "generation_server/0", "evaluator/0"
# Says who it is, then waits for the test to say how to end.
WORKER = """
echo "$$" >> {root}/{name}.pids; echo "here $$"
while :; do
  if [ -e {root}/{name}.end-$$ ]; then exit $(cat {root}/{name}.end-$$); fi
  if [ -e {root}/{name}.always ]; then exit $(cat {root}/{name}.always); fi
  sleep 0.01
done
"""


class Trial:
    """A supervisor over a master, two model workers and a generation server, which are shell scripts."""

    def __init__(
        self,
        root: Path,
        *,
        on_slurm: bool = False,
        evaluates: bool = False,
        policy: RestartPolicy,
    ) -> None:
        self.root = root
        self.workers = [MASTER, "model_worker/0", "model_worker/1", SERVER]
        self.workers += [EVALUATOR] * evaluates
        plan = make_plan(root)
        (phase,) = plan.phases
        one = TasksGroup(count=1, scheduling=Scheduling())
        groups = replace(phase.scheduling, generation_server=one)
        groups = replace(groups, evaluator=one) if evaluates else groups
        phase = replace(phase, scheduling=groups)
        self.plan = replace(plan, phases=(phase,), job=plan.job if on_slurm else None)
        self.trial = write_plan(self.plan)
        self.store, self.keys = open_store(self.plan.name_resolve_url), TrialKeys.of(self.plan)
        self.attempt, self.files = claim_attempt(self.trial, self.store, self.keys, job=Job())
        self.steps = LocalSteps(self.plan, "hash", self.files)
        self.supervisor = Supervisor(
            self.plan,
            "hash",
            self.attempt,
            self.trial,
            self.files,
            self.store,
            self.keys,
            self.steps,
        )
        self.supervisor.restarts.policy = policy
        self.supervisor.leases.detector = FailureDetector(lost_s=0.1, settle_s=0.2)
        self.marker: ExitMarker | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.marker = self.supervisor.run()

    def command(self, *, worker_type: str, index: int, **_: object) -> list[str]:
        text = WORKER.format(root=self.root, name=f"{worker_type}-{index}")
        return ["/bin/sh", "-c", text]

    def begin(self) -> Trial:
        self._thread.start()
        for worker in self.workers:
            self.pid(worker)
        return self

    def pids(self, worker: str) -> list[int]:
        path = self.root / f"{worker.replace('/', '-')}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def pid(self, worker: str, starts: int = 1) -> int:
        """Of the process, once it was started so often."""
        wait_until(lambda: len(self.pids(worker)) >= starts or self.marker is not None)
        assert self.marker is None, self.marker
        return self.pids(worker)[starts - 1]

    def end(self, worker: str, code: int, *, always: bool = False) -> None:
        name = worker.replace("/", "-")
        suffix = "always" if always else f"end-{self.pids(worker)[-1]}"
        made = self.root / "made"
        made.write_text(str(code))
        made.rename(self.root / f"{name}.{suffix}")

    def register(self, worker: str, pid: int, *, stalled_s: float = 0.0) -> None:
        kind, _, index = worker.partition("/")
        record = WorkerRecord(
            worker=worker,
            host="n1",
            pid=pid,
            start=process_start(pid) or 0,
            attempt=1,
            token=self.attempt.token,
        )
        status = WorkerStatus(
            state="running", token=self.attempt.token, step=3, stalled_s=stalled_s
        )
        lease = self.store.grant(60.0)
        key = self.keys.worker(kind, int(index))
        self.store.add(key, dumps(record), lease=lease, replace=True)
        told = self.keys.worker_status(kind, int(index))
        self.store.add(told, dumps(status), lease=lease, replace=True)

    def outcome(self) -> ExitMarker:
        self._thread.join(60)
        assert self.marker is not None, "it goes on"
        return self.marker

    def finish(self) -> ExitMarker:
        """The master is done, and everybody leaves."""
        self.all_leave_but()
        return self.outcome()

    def all_leave_but(self, *staying: str) -> None:
        self.files.done("main").write_text(f'{{"token": "{self.attempt.token}"}}')
        for worker in self.workers:
            if worker not in staying:
                self.end(worker, 0, always=True)

    def restarts(self) -> list[dict[str, object]]:
        path = self.files.restarts
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def operations(self, worker: str) -> list[str]:
        return [row["op"] for row in read_history(self.trial.root) if row["worker"] == worker]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module, name, seconds in (
        (supervisor_module, "POLL_S", 0.005),
        (supervisor_module, "LAST_WORDS_S", 0.05),
        (supervisor_module, "STACKS_S", 0.05),
        (worker_restarts, "STACKS_S", 0.05),
        (worker_leases, "LOOK_S", 0.01),
    ):
        monkeypatch.setattr(module, name, seconds)
    made: list[Trial] = []

    def make(*, max_restarts: int = 5, pause_s: float = 0.02, **options: bool) -> Trial:
        policy = RestartPolicy(max_restarts=max_restarts, first_pause_s=pause_s)
        made.append(Trial(tmp_path, policy=policy, **options))
        monkeypatch.setattr(local_steps, "command", made[-1].command)
        return made[-1]

    yield make
    for one in made:
        if one.marker is None:
            one.finish()
        one.store.close()


def test_a_server_that_ends_is_started_again_and_nobody_else(trial):
    one = trial().begin()
    first = one.pid(SERVER)
    words = Failure(
        worker=SERVER, host="n1", pid=first, why="no memory left", at=5.0, fix="buy some"
    )
    write_record(one.files.failure_record(SERVER), words)
    one.end(SERVER, 3)
    second = one.pid(SERVER, starts=2)
    one.end(SERVER, 4)
    third = one.pid(SERVER, starts=3)
    assert len({first, second, third}) == 3
    assert one.finish().result is Result.COMPLETED
    assert [len(one.pids(w)) for w in (MASTER, "model_worker/0", "model_worker/1")] == [1, 1, 1]
    told = [(r["worker"], r["number"], r["pid"], r["why"]) for r in one.restarts()]
    assert told == [
        (SERVER, 1, first, "no memory left"),
        (SERVER, 2, second, "exited with code 4"),  # not the first one's last words
    ]
    first_row = one.restarts()[0]
    assert (first_row["ended_at"], first_row["log_tail"]) == (5.0, [f"here {first}"])
    assert one.files.log(SERVER).read_text().split() == [
        *("here", str(first)),
        *("here", str(second)),
        *("here", str(third)),
    ]
    assert one.operations(SERVER) == [Op.EXITED, Op.RESTARTED, Op.EXITED, Op.RESTARTED]


def test_one_that_left_as_it_should_is_not_started_again(trial):
    one = trial().begin()
    one.end(SERVER, 0)
    wait_until(lambda: not is_running(one.pid(SERVER)))
    assert one.finish().result is Result.COMPLETED
    assert (one.pids(SERVER)[1:], one.restarts()) == ([], [])


def is_running(pid: int) -> bool:
    return process_start(pid) is not None


def test_its_key_is_removed_and_the_next_ones_counts(trial):
    one = trial().begin()
    first = one.pid(SERVER)
    one.register(SERVER, first)
    leases = one.supervisor.leases
    wait_until(lambda: SERVER in leases.registered)
    one.end(SERVER, 3)
    second = one.pid(SERVER, starts=2)
    wait_until(lambda: one.restarts())
    with pytest.raises(KeyNotFound):
        one.store.get(one.keys.worker("generation_server", 0))
    assert SERVER not in leases.registered
    one.register(SERVER, second)
    wait_until(lambda: SERVER in leases.registered)
    assert leases.registered[SERVER].pid == second


def test_one_that_hangs_is_killed_and_started_again(trial):
    one = trial().begin()
    first = one.pid(SERVER)
    one.register(SERVER, first, stalled_s=40.0)
    second = one.pid(SERVER, starts=2)
    assert not is_running(first)
    asked = one.store.find_subtree(one.keys.commands)
    wait_until(lambda: one.restarts())
    (row,) = one.restarts()
    golden.check(row["why"])
    assert row["kind"] == "Stalled"
    assert one.operations(SERVER) == [Op.LOST, Op.RESTARTED]
    assert asked == [], "the order to write stacks was the former one's"
    one.register(SERVER, second)
    assert one.finish().result is Result.COMPLETED


def test_a_model_worker_that_hangs_ends_the_trial_as_ever(trial):
    one = trial().begin()
    one.register("model_worker/0", one.pid("model_worker/0"), stalled_s=40.0)
    marker = one.outcome()
    assert (marker.result, marker.first_failure.worker) == (Result.FAILED, "model_worker/0")


def test_when_the_restarts_are_used_up_the_trial_fails_with_its_failure(trial):
    one = trial(max_restarts=2).begin()
    one.end(SERVER, 7, always=True)
    marker = one.outcome()
    first = marker.first_failure
    assert (marker.result, first.worker, marker.other_failures) == (Result.FAILED, SERVER, ())
    golden.check(first.why)
    assert len(one.pids(SERVER)) == 3
    assert [row["number"] for row in one.restarts()] == [1, 2]


def test_a_worker_that_refuses_its_configuration_ends_the_trial_at_once(trial):
    one = trial().begin()
    words = Failure(
        worker=SERVER,
        host="n1",
        pid=one.pid(SERVER),
        why="no such family",
        at=5.0,
        kind="ConfigError",
        fix="name another",
    )
    write_record(one.files.failure_record(SERVER), words)
    one.end(SERVER, 1)
    first = one.outcome().first_failure
    assert (first.why, first.fix) == ("no such family", "name another")
    assert (len(one.pids(SERVER)), one.restarts()) == (1, [])


def test_a_server_that_is_down_is_not_blamed_when_the_master_fails(trial):
    one = trial(pause_s=60.0).begin()
    one.end(SERVER, 3)
    wait_until(lambda: one.supervisor.restarts.is_down(SERVER))
    one.end(MASTER, 5)
    marker = one.outcome()
    assert (marker.result, marker.first_failure.worker) == (Result.FAILED, MASTER)
    golden.check(marker.first_failure.why)
    assert marker.other_failures == ()
    assert len(one.pids(SERVER)) == 1


def test_nothing_is_started_while_the_trial_is_asked_to_stop(trial):
    one = trial().begin()
    one.supervisor.request_stop("anna", grace_s=0.5)
    wait_until(lambda: one.supervisor.stop_watch.is_requested)
    one.end(SERVER, 3)
    assert one.outcome().result is Result.STOPPED
    assert (len(one.pids(SERVER)), one.restarts()) == (1, [])


def test_a_server_that_can_not_be_started_again_ends_the_trial_with_both_reasons(
    trial, monkeypatch
):
    def refuse(self: LocalSteps, task: object) -> None:
        raise ClusterError("no host has room", where="n1", fix="wait")

    monkeypatch.setattr(LocalSteps, "restart", refuse)
    one = trial().begin()
    one.end(SERVER, 3)
    first = one.outcome().first_failure
    golden.check(first.why)
    assert (first.worker, first.fix) == (SERVER, "wait")


# ---- evaluators, which the trial can do without ----------------------------------------------------


def test_the_trial_goes_on_without_an_evaluator_that_can_not_be_started_again(trial):
    one = trial(max_restarts=2, evaluates=True).begin()
    one.end(EVALUATOR, 7, always=True)
    wait_until(lambda: one.supervisor.restarts.is_given_up(EVALUATOR))
    marker = one.finish()
    assert (marker.result, marker.first_failure) == (Result.COMPLETED, None)
    assert (len(one.pids(EVALUATOR)), [r["number"] for r in one.restarts()]) == (3, [1, 2])


def test_an_evaluator_that_no_host_has_room_for_is_left_down(trial, monkeypatch):
    def refuse(self: LocalSteps, task: object) -> None:
        raise ClusterError("no host has room", where="n1", fix="wait")

    monkeypatch.setattr(LocalSteps, "restart", refuse)
    one = trial(evaluates=True).begin()
    one.end(EVALUATOR, 3)
    wait_until(lambda: one.supervisor.restarts.is_given_up(EVALUATOR))
    assert one.finish().result is Result.COMPLETED


def test_an_evaluator_is_waited_for_and_started_again_when_the_master_is_done(trial, monkeypatch):
    monkeypatch.setattr(supervisor_module, "GOODBYE_S", 0.0)
    one = trial(evaluates=True).begin()
    one.all_leave_but(EVALUATOR)
    one.end(EVALUATOR, 9)
    assert one.pid(EVALUATOR, starts=2)
    assert one.marker is None, "it was not waited for"
    one.end(EVALUATOR, 0)
    assert one.outcome().result is Result.COMPLETED
    assert not is_running(one.pids(EVALUATOR)[1])


@pytest.mark.parametrize("by", ["a stop", "the time"])
def test_an_evaluator_is_not_waited_for_for_ever(trial, monkeypatch, by):
    if by == "the time":
        monkeypatch.setattr(supervisor_module, "EVALUATIONS_S", 0.05)
    monkeypatch.setattr(supervisor_module, "GOODBYE_S", 0.0)
    one = trial(evaluates=True).begin()
    one.all_leave_but(EVALUATOR)
    if by == "a stop":
        one.supervisor.request_stop("anna", grace_s=60.0)
    assert one.outcome().result is Result.COMPLETED
    assert not is_running(one.pids(EVALUATOR)[0])


# ---- lost, as on Slurm -----------------------------------------------------------------------------


@dataclass
class Task:
    """One that runs until the test says otherwise."""

    worker: str
    host: str = "n1"
    pid: int = 0
    ended_at: float | None = None
    hint: str = ""
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


class Played:
    """Steps whose tasks are values."""

    def __init__(self, *, dies: bool = True) -> None:
        self.tasks = [Task(MASTER), Task("model_worker/0"), Task(SERVER)]
        self.dies, self.killed, self.started = dies, [], []

    def start(self, phase: object) -> list[Task]:
        return list(self.tasks)

    def kill(self, task: Task) -> None:
        self.killed.append(task)
        if self.dies:
            task.returncode = -9

    def restart(self, task: Task) -> Task:
        assert task.returncode is not None, "the former one runs"
        self.started.append(Task(task.worker))
        return self.started[-1]

    def end(self, tasks: object, *, grace_s: float) -> None:
        pass


def lost_trial(trial, played: Played) -> Trial:
    one = trial(on_slurm=True)
    one.steps = one.supervisor.steps = one.supervisor.restarts.steps = played
    for task in played.tasks:
        one.register(task.worker, pid=1)
    one._thread.start()
    wait_until(lambda: SERVER in one.supervisor.leases.registered)
    one.store.delete(one.keys.worker("generation_server", 0))
    return one


def test_one_that_is_lost_is_killed_and_started_again_and_not_lost_again(trial):
    played = Played()
    one = lost_trial(trial, played)
    wait_until(lambda: played.started)
    assert [task.worker for task in played.killed] == [SERVER]
    wait_until(lambda: one.restarts())
    golden.check(one.restarts()[0]["why"])
    threading.Event().wait(0.3)  # longer than lost_s: who has not registered yet is not missed
    assert (len(played.started), one.marker) == (1, None)
    one.register(SERVER, pid=2)
    wait_until(lambda: SERVER in one.supervisor.leases.registered)
    for task in (*played.tasks, *played.started):
        task.returncode = 0
    one.files.done("main").write_text(f'{{"token": "{one.attempt.token}"}}')
    assert one.outcome().result is Result.COMPLETED


def test_one_that_can_not_be_killed_ends_the_trial(trial, monkeypatch):
    monkeypatch.setattr(worker_restarts, "KILL_TIMEOUT_S", 0.1)
    one = lost_trial(trial, Played(dies=False))
    first = one.outcome().first_failure
    assert (first.worker, one.restarts()) == (SERVER, [])
    golden.check(first.why)


def test_one_whose_step_cant_be_started_is_not_tried_again_and_again(trial):
    played = Played()
    one = trial(on_slurm=True)
    one.steps = one.supervisor.steps = one.supervisor.restarts.steps = played
    server = played.tasks[-1]
    server.returncode, server.hint = (
        worker_exit_codes.NOT_STARTED,
        "srun could not start its step for 180 s",
    )
    one._thread.start()
    first = one.outcome().first_failure
    golden.check((first.worker, first.why, played.started))
