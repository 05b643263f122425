"""A worker whose lease has ended, though nobody saw its process end, is lost; who left is not."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import golden
import pytest
from stand_in_slurm import make_plan, wait_until, write_plan

from realsys.api.errors import StoreUnavailable
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.slurm.lost_nodes import lost_nodes
from realsys.supervisor import supervisor as supervisor_module
from realsys.supervisor.attempt.attempt import Job, claim_attempt
from realsys.supervisor.health import failure_detector, late_evidence, worker_leases
from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.supervisor.health.late_evidence import LateEvidence
from realsys.supervisor.supervisor import Supervisor
from realsys.trial.records import (
    ExitMarker,
    Failure,
    Result,
    StopRequest,
    WorkerExit,
    WorkerRecord,
    WorkerStatus,
    dumps,
    loads,
    write_record,
)

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

    def __init__(self, root: Path, caplog, *, local: bool = False, lost_s: float = 0.1) -> None:
        self.caplog = caplog
        plan = make_plan(root)
        self.plan = replace(plan, job=None) if local else plan
        files = write_plan(self.plan)
        self.store, keys = open_store(self.plan.name_resolve_url), TrialKeys.of(self.plan)
        self.keys = keys
        self.attempt, self.files = claim_attempt(files, self.store, keys, job=Job())
        self.tasks = {
            MASTER: Task(MASTER, host="n1"),
            FIRST: Task(FIRST, host="n1"),
            SECOND: Task(SECOND),
        }
        self.ended: list[float] = []
        self.asked = 0
        self.has_begun = threading.Event()
        self.store_answers = True
        self.at_once = threading.Lock()  # held: what is done to the store is seen by one look
        self.supervisor = Supervisor(
            self.plan, "hash", self.attempt, files, self.files, self, keys, self
        )
        self.supervisor.leases.detector = FailureDetector(lost_s=lost_s, settle_s=0.2)
        self.unreachable: dict[str, str] = {}  # by Slurm
        self.supervisor.evidence = LateEvidence(
            self.supervisor.leases, ask=lambda hosts: self.unreachable, timeout_s=600.0
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
        self.asked += prefix == self.keys.workers
        if not self.store_answers:
            raise StoreUnavailable("no answer", where="store", fix="wait")
        with self.at_once:
            return self.store.get_subtree(prefix)

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def start(self, phase):
        self.has_begun.set()
        return list(self.tasks.values())

    def end(self, tasks, *, grace_s: float) -> None:
        self.ended.append(grace_s)

    # ---- the test's side

    def fail(self, worker: str, why: str, *, kind: str = "RuntimeError") -> None:
        """A worker ends, and leaves its reason."""
        task = self.tasks[worker]
        said = Failure(worker=worker, host=task.host, pid=70, why=why, at=time.time(), kind=kind)
        write_record(self.files.failure_record(worker), said)
        task.returncode = 1

    def wait_for_its_question(self) -> None:
        """Until the supervisor waits for a cause."""
        waits = "waiting for their cause"
        wait_until(lambda: any(waits in m for m in self.caplog.messages) or self.marker is not None)
        assert self.marker is None, self.marker

    def _run(self) -> None:
        self.marker = self.supervisor.run()

    def begin(self) -> Trial:
        """Runs until the phase has begun and, on Slurm, all leases have been seen."""
        self._thread.start()
        wait_until(lambda: self.has_begun.is_set() or self.marker is not None)
        if self.plan.job is not None:
            seen = self.supervisor.leases.registered  # of one look: all or none
            wait_until(lambda: seen or self.marker is not None)
            self.look()
        return self

    def look(self, times: int = 2) -> None:
        """Until the supervisor has looked at the leases so often again."""
        wanted = self.asked + times
        wait_until(lambda: self.asked >= wanted or self.marker is not None)

    def outcome(self) -> ExitMarker:
        self._thread.join(60)
        assert self.marker is not None
        return self.marker

    def finish(self) -> ExitMarker:
        """The master is done, and everybody leaves."""
        done = self.files.done("main")
        done.write_text(f'{{"token": "{self.attempt.token}"}}')
        for task in self.tasks.values():
            task.returncode = 0
        return self.outcome()


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name, seconds in {
        "POLL_S": 0.005,
        "LAST_WORDS_S": 0.02,
        "STACKS_S": 0.05,
    }.items():
        monkeypatch.setattr(supervisor_module, name, seconds)
    monkeypatch.setattr(worker_leases, "LOOK_S", 0.01)
    monkeypatch.setattr(late_evidence, "NODES_EVERY_S", 0.01)
    monkeypatch.setattr(late_evidence, "POLL_S", 0.005)
    monkeypatch.setattr(late_evidence, "TOGETHER_S", 0.05)
    made: list[Trial] = []

    def make(**changes) -> Trial:
        made.append(Trial(tmp_path, caplog, **changes))
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
    golden.check(first.why)
    assert marker.resume == "realsys resume ppo-math/run1"
    assert one.ended == [supervisor_module.END_GRACE_S] * 2


def test_where_it_ran_is_known_from_its_registration_where_nobody_else_knows(trial):
    one = trial().begin()
    one.leases[SECOND].revoke()
    first = one.outcome().first_failure
    assert (first.worker, first.host, first.pid) == (SECOND, "host-of-model_worker-1", 71)


def test_all_that_were_lost_together_are_named(trial):
    one = trial().begin()
    with one.at_once:
        one.leases[FIRST].revoke()
        one.leases[SECOND].revoke()
    marker = one.outcome()  # of three on three hosts: not many
    failures = [marker.first_failure, *marker.other_failures]
    assert sorted(failure.worker for failure in failures) == [FIRST, SECOND]


def test_a_lease_that_comes_back_in_time_is_no_loss(trial):
    one = trial(lost_s=60.0).begin()
    one.leases[FIRST].revoke()
    wait_until(lambda: list(one.supervisor.leases.detector.gone_since_s) == [FIRST])
    one.register(FIRST)
    wait_until(lambda: one.supervisor.leases.detector.gone_since_s == {})
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
    golden.check(set(caplog.messages))
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


def test_a_task_whose_end_is_seen_in_time_fails_for_its_own_reason(trial):
    one = trial(lost_s=60.0).begin()
    one.leases[FIRST].revoke()
    one.look()
    one.tasks[FIRST].hint = "srun: Killed on n1"
    one.tasks[FIRST].returncode = -9
    first = one.outcome().first_failure
    golden.check(first.why)


def test_a_local_run_declares_nobody_lost(trial):
    one = trial(local=True).begin()
    one.leases[FIRST].revoke()
    one.look(20)
    time.sleep(0.15)
    assert one.finish().result is Result.COMPLETED


def test_all_leases_gone_at_one_moment_is_the_stores_trouble_for_a_while(trial, caplog):
    one = trial().begin()
    detector = one.supervisor.leases.detector
    detector.settle_s = 600.0
    with one.at_once:
        for lease in one.leases.values():
            lease.revoke()
    wait_until(lambda: len(detector.gone_since_s) == len(one.leases))
    one.look(20)
    time.sleep(0.15)
    assert one.marker is None
    golden.check(caplog.messages)
    for worker in one.tasks:
        one.register(worker)
    assert one.finish().result is Result.COMPLETED


def test_the_first_request_to_stop_stands(trial):
    one = trial()
    assert one.supervisor.request_stop("anna", grace_s=60.0)
    assert not one.supervisor.request_stop("Slurm (time limit)", grace_s=5.0)
    one.begin().finish()
    request = loads(StopRequest, one.store.get(one.keys.stop).value, where="stop")
    assert (request.by, request.grace_seconds) == ("anna", 60.0)


# ---- connections that break before the cause is known ------------------------------------------

RESET = "[…/gloo/transport/tcp/pair.cc:537] Read error [10.78.0.2]:48293: Connection reset by peer"


def test_peers_of_a_node_that_reboots_wait_for_its_lease_and_it_is_named(trial):
    one = trial().begin()
    one.fail(FIRST, RESET)
    one.wait_for_its_question()
    one.leases[SECOND].revoke()
    marker = one.outcome()
    first, (other,) = marker.first_failure, marker.other_failures
    assert (first.worker, first.host, first.secondary) == (SECOND, "host-of-model_worker-1", False)
    golden.check(first.why)
    assert (other.worker, other.host, other.secondary) == (FIRST, "n1", True)
    assert list(lost_nodes(marker, "host-of-model_worker-[0-1]")) == ["host-of-model_worker-1"]


def test_a_lease_and_a_reset_at_once_name_the_node_too(trial, monkeypatch):
    """The reset comes while peers may say their last words: it must not replace the lost worker."""
    monkeypatch.setattr(supervisor_module, "LAST_WORDS_S", 0.5)
    one = trial().begin()
    one.leases[SECOND].revoke()
    wait_until(lambda: SECOND in one.supervisor.leases.detector.gone_since_s)
    one.fail(FIRST, RESET)
    marker = one.outcome()
    assert marker.first_failure.worker == SECOND
    assert list(lost_nodes(marker, "host-of-model_worker-[0-1]")) == ["host-of-model_worker-1"]


def test_a_peer_that_has_ended_is_not_lost_though_srun_is_late_to_say_so(trial):
    """Its parent has recorded its end: its node lives."""
    one = trial().begin()
    with one.at_once:
        one.leases[FIRST].revoke()
        one.leases[SECOND].revoke()
    told = WorkerExit(worker=FIRST, host="n1", pid=70, returncode=1, at=1.0)
    write_record(one.files.exit_of(FIRST), told)
    marker = one.outcome()
    assert (marker.first_failure.worker, marker.other_failures) == (SECOND, ())


def test_leases_that_are_in_doubt_are_waited_for(trial, monkeypatch):
    """Two hosts' leases end at once, as a store's trouble would end them; one of them is back."""
    monkeypatch.setattr(failure_detector, "AT_ONCE_S", 0.2)
    one = trial()
    one.supervisor.evidence.timeout_s = None
    one.supervisor.leases.detector = FailureDetector(lost_s=0.1, settle_s=0.5)
    one.begin()
    one.fail(FIRST, RESET)
    one.wait_for_its_question()
    one.leases[FIRST].revoke()
    wait_until(lambda: FIRST not in one.supervisor.leases.detector.hosts)
    with one.at_once:
        one.leases[MASTER].revoke()
        one.leases[SECOND].revoke()
    wait_until(lambda: one.supervisor.leases.is_frozen)
    one.register(MASTER)
    assert one.outcome().first_failure.worker == SECOND


def test_a_heartbeat_that_dies_with_its_node_is_not_the_cause(trial):
    one = trial().begin()
    one.fail(SECOND, "its heartbeat process ended with code -9", kind="Fenced")
    one.tasks[SECOND].hint = "srun ended with 137: Timed out waiting for job step to complete"
    one.wait_for_its_question()
    one.leases[SECOND].revoke()
    marker = one.outcome()
    assert list(lost_nodes(marker, "host-of-model_worker-[0-1]")) == ["host-of-model_worker-1"]


def test_slurms_word_names_the_node_before_its_lease_does(trial):
    one = trial().begin()
    one.fail(FIRST, "no reply from model_worker/1 to clear data in 60 s", kind="WaitTimeout")
    one.wait_for_its_question()
    one.unreachable = {"host-of-model_worker-1": "DOWN*: Not responding"}
    marker = one.outcome()
    first = marker.first_failure
    golden.check((first.worker, first.why.partition(" (")[0]))
    assert "model_worker/0 on n1" in first.why
    assert list(lost_nodes(marker, "host-of-model_worker-[0-1]")) == ["host-of-model_worker-1"]


def test_a_node_that_died_before_its_worker_had_registered_is_named(trial):
    """It is back soon: Slurm ends the step on all nodes, and srun has heard of the other node's tasks."""
    one = trial()
    one.supervisor.evidence.timeout_s = 0.1
    one.tasks[SECOND].host = "n2"
    one.leases[SECOND].revoke()
    one.begin()
    one.files.log(FIRST).parent.mkdir(parents=True, exist_ok=True)
    one.files.log(FIRST).write_text(
        "registered\nslurmstepd-n1: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-11-27T22:03:46 ***\n"
    )
    one.tasks[SECOND].hint = "srun ended with 137: Timed out waiting for job step to complete"
    one.tasks[FIRST].hint = "srun: Killed on n1"
    one.tasks[FIRST].returncode, one.tasks[SECOND].returncode = -9, 137
    marker = one.outcome()
    (other,) = marker.other_failures
    assert (marker.first_failure.worker, marker.first_failure.host) == (SECOND, "n2")
    assert (other.worker, other.secondary) == (FIRST, True)
    golden.check(other.why)
    assert list(lost_nodes(marker, "n[1-2]")) == ["n2"]


def test_a_worker_of_a_cancelled_step_whose_lease_ends_later_is_named(trial):
    one = trial().begin()
    one.tasks[SECOND].hint = "srun ended with 137: Timed out waiting for job step to complete"
    one.tasks[SECOND].returncode = 137
    one.wait_for_its_question()
    one.leases[SECOND].revoke()
    marker = one.outcome()
    assert list(lost_nodes(marker, "host-of-model_worker-[0-1]")) == ["host-of-model_worker-1"]
    golden.check(marker.first_failure.why)


def test_a_reason_of_somebodys_own_ends_the_wait(trial):
    one = trial().begin()
    one.fail(FIRST, RESET)
    one.wait_for_its_question()
    one.fail(SECOND, "ValueError: a bad record", kind="ValueError")
    marker = one.outcome()
    assert (marker.first_failure.worker, marker.first_failure.secondary) == (SECOND, False)
    assert lost_nodes(marker, "host-of-model_worker-[0-1]") == {}


def test_where_nobody_fell_silent_both_ends_are_named_and_no_node_is_blamed(trial):
    one = trial()
    one.supervisor.evidence.timeout_s = 0.1
    one.begin()
    one.fail(FIRST, "no reply from model_worker/1 in 60 s (link: disconnected)", kind="WaitTimeout")
    marker = one.outcome()
    first = marker.first_failure
    assert (first.worker, first.secondary) == (FIRST, True)
    for end in ("n1", "host-of-model_worker-1"):
        assert end in first.why
        assert end in first.fix
    assert lost_nodes(marker, "host-of-model_worker-[0-1]") == {}


def test_on_one_machine_nothing_is_waited_for(trial):
    one = trial(local=True).begin()
    one.fail(FIRST, RESET)
    assert one.outcome().first_failure.why == RESET


def test_connections_that_break_while_a_run_is_stopped_are_the_stops(trial):
    one = trial().begin()
    one.supervisor.request_stop("Slurm (preemption)", grace_s=600.0)
    wait_until(lambda: one.supervisor.stop_watch.is_requested)
    one.fail(FIRST, RESET)
    assert one.outcome().result is Result.STOPPED


def test_a_stop_by_slurm_because_a_node_is_down_is_the_nodes(trial):
    """Slurm ends the job of a node that it calls down: SIGTERM, as for a user's scancel."""
    one = trial().begin()
    one.fail(FIRST, RESET)
    one.wait_for_its_question()
    one.supervisor.evidence.ask = lambda hosts: {"host-of-model_worker-1": "down*: Not responding"}
    one.supervisor.request_stop("Slurm (SIGTERM: cancelled or preempted)", grace_s=600.0)
    marker = one.outcome()
    assert (marker.result, marker.first_failure.worker) == (Result.FAILED, SECOND)
    assert list(lost_nodes(marker, "host-of-model_worker-[0-1]")) == ["host-of-model_worker-1"]


def test_a_worker_that_fails_while_a_run_is_stopped_has_failed(trial):
    one = trial().begin()
    one.supervisor.request_stop("Slurm (preemption)", grace_s=600.0)
    one.fail(FIRST, "ValueError: a bad record", kind="ValueError")
    assert one.outcome().result is Result.FAILED


def stall(one: Trial, worker: str, *, where: str = "", waits_for: str = "") -> None:
    kind, _, index = worker.partition("/")
    status = WorkerStatus(
        state="running",
        mfc="actor_train",
        step=7,
        token=one.attempt.token,
        stalled_s=62.0,
        stalled_where=where,
        waits_for=waits_for,
    )
    one.store.add(one.keys.worker_status(kind, int(index)), dumps(status), replace=True)


def test_a_worker_that_stands_still_fails_the_attempt_and_not_who_waits_for_it(trial):
    one = trial()
    stall(one, SECOND, where="all_reduce (distributed_c10d.py:2501)")
    stall(one, FIRST, where="stopped by SIGSTOP")
    marker = one.begin().outcome()
    first = marker.first_failure
    assert (first.worker, first.kind, marker.other_failures) == (FIRST, "Stalled", ())
    golden.check(first.why)
    assert str(one.files.stacks) in first.fix
    asked = one.store.find_subtree(one.keys.commands)
    assert [key.rsplit("/", 2)[1:] for key in asked] == [
        ["master_worker", "0"],
        ["model_worker", "0"],
        ["model_worker", "1"],
    ]


def test_a_damaged_key_hides_nobody_else(trial, caplog):
    """Else one bad value would blind the supervisor for the rest of the run."""
    one = trial()
    for key in (one.keys.worker("model_worker", 7), one.keys.worker_status("model_worker", 0)):
        one.store.add(key, b"{", replace=True)
    one.store.add(one.keys.stop, b"not json")
    one.begin()
    one.look(times=20)
    one.leases[FIRST].revoke()
    marker = one.outcome()
    assert (marker.result, marker.first_failure.worker) == (Result.FAILED, FIRST)
    told = [m for m in caplog.messages if "holds no" in m]
    assert sorted(m.partition(" holds")[0] for m in told) == [
        f"the key '{one.keys.stop}'",
        f"the key '{one.keys.worker('model_worker', 7)}'",
        f"the key '{one.keys.worker_status('model_worker', 0)}'",
    ], "each once"
    assert all("realsys resume" in m and "etcdctl del" in m for m in told)
