"""Attempts: one incarnation at a time, numbered, each with a token of its own."""

import errno
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest

from realsys.api.errors import (
    KeyNotFound,
    StaleAttempt,
    StoreUnavailable,
    TrialError,
    TrialIsLive,
)
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.supervisor.attempt.attempt import MOST_AT_ONCE, Job, claim_attempt, end_attempt
from realsys.transport.curve_keys import TrialKeypairs
from realsys.trial.machine_identity import this_machine
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Result,
    TrialFiles,
    TrialRecord,
    dumps,
    loads,
    process_start,
    read_record,
    write_record,
)

KEYS = TrialKeys(cluster="local", user="anna", experiment="ppo-math", trial="run1")


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    url = f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/store"
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    root = tmp_path / "run1"
    root.mkdir()
    return TrialFiles(root)


def take(files, store):
    return claim_attempt(files, store, KEYS, job=Job(job_id="77"))


def end(files, number, result=Result.FAILED):
    marker = ExitMarker(result=result, attempt=number, ended_at=2.0, phase="main")
    write_record(files.attempt(number).exit, marker)


def gone_process() -> tuple[int, int]:
    """Pid and start of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid)
    child.communicate(b"\n", timeout=60)
    return child.pid, start


def attempt_of(number, *, pid, start, host=None):
    return AttemptRecord(
        number=number,
        token="t",
        host=host or socket.gethostname(),
        supervisor_pid=pid,
        supervisor_start=start,
        started_at=1.0,
    )


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, Job()),
        ({"SUBMITIT_LOCAL_JOB_ID": "9"}, Job(job_id="9")),
        (
            {"SLURM_JOB_ID": "12", "SUBMITIT_LOCAL_JOB_ID": "9", "SLURM_RESTART_COUNT": "2",
             "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_0": "n7"},
            Job(job_id="12", restart_count=2, nodes="n[1-2]"),
        ),
        (
            {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3",
             "SLURM_HET_SIZE": "1", "SLURM_JOB_NODELIST": "n1"},
            Job(job_id="12_3", nodes="n1"),
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST": "n1",
             "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_2": "n[3-4]"},
            Job(job_id="12", nodes="n1,n[3-4]"),
        ),
    ],
)  # fmt: skip
def test_the_job_of_a_batch_step(environ, job):
    assert Job.from_environment(environ) == job


def test_the_machine_is_recorded_where_slurm_does_not_say_what_lives(files, store):
    on_slurm, _ = claim_attempt(files, store, KEYS, job=Job(job_id="77", nodes="n[1-2]"))
    assert (on_slurm.nodes, on_slurm.machine) == ("n[1-2]", None)
    end(files, 1)
    here, _ = claim_attempt(files, store, KEYS, job=Job(job_id="77"))
    assert (here.nodes, here.machine) == ("", this_machine())


# ---- taking one -----------------------------------------------------------------------------------


def test_the_first_attempt_is_number_one_and_names_this_process(files, store):
    record, attempt = take(files, store)
    assert (record.number, attempt.number) == (1, 1)
    assert (record.supervisor_pid, record.supervisor_start) == (
        os.getpid(),
        process_start(os.getpid()),
    )
    assert record.host == socket.gethostname()
    assert record.job_id == "77"
    assert len(record.token) == 32


def test_its_record_is_in_the_store_and_in_its_folder(files, store):
    record, attempt = take(files, store)
    assert store.get(KEYS.attempt).value == dumps(record)
    assert read_record(AttemptRecord, attempt.record) == record
    assert attempt.logs.is_dir()
    assert attempt.failure_records.is_dir()


def test_latest_points_to_the_newest(files, store):
    for number in (1, 2):
        take(files, store)
        assert os.readlink(files.latest) == f"attempts/{number:04d}"
        end(files, number)


def test_numbers_grow_and_tokens_differ(files, store):
    records = []
    for number in (1, 2, 3):
        records.append(take(files, store)[0])
        end(files, number)
    assert [r.number for r in records] == [1, 2, 3]
    assert len({r.token for r in records}) == 3


def test_numbers_grow_also_when_the_store_was_lost(files, store):
    for number in (1, 2):
        take(files, store)
        end(files, number)
    store.delete(KEYS.attempt)
    assert take(files, store)[0].number == 3


def test_numbers_grow_also_when_the_folder_was_lost(files, store):
    write = attempt_of(7, pid=gone_process()[0], start=1)
    store.add(KEYS.attempt, dumps(write))
    assert take(files, store)[0].number == 8


def test_a_new_attempt_forgets_what_the_older_one_told(files, store):
    take(files, store)
    end(files, 1)
    told = [KEYS.worker("model_worker", 0), KEYS.worker_status("model_worker", 0)]
    told += [KEYS.progress, KEYS.stop, KEYS.done]
    for key in told:
        store.add(key, b"old")
    store.add(KEYS.checkpoint("main"), b"kept")
    take(files, store)
    for key in told:
        with pytest.raises(KeyNotFound):
            store.get(key)
    assert store.get(KEYS.checkpoint("main")).value == b"kept"


def test_more_keys_than_one_transaction_takes_are_forgotten_too(files, store):
    take(files, store)
    end(files, 1)
    for index in range(MOST_AT_ONCE + 1):
        store.add(KEYS.worker_status("model_worker", index), b"old")
    take(files, store)
    assert store.find_subtree(KEYS.worker_statuses) == []


# ---- a live one -----------------------------------------------------------------------------------


def test_a_live_attempt_is_not_replaced_and_says_who_runs(files, store):
    take(files, store)
    with golden.raises(TrialIsLive) as live:
        take(files, store)
    assert live.value.where == str(files.root)
    assert "realsys stop" in live.value.fix
    assert [a.number for a in files.all_attempts()] == [1]


def test_an_attempt_that_wrote_its_end_is_over_though_its_process_lives(files, store):
    """It is drawing the report: that must not hold up a resume."""
    take(files, store)
    end(files, 1, Result.COMPLETED)
    assert take(files, store)[0].number == 2


def test_a_killed_supervisors_attempt_is_over(files, store):
    pid, start = gone_process()
    store.add(KEYS.attempt, dumps(attempt_of(1, pid=pid, start=start)))
    assert take(files, store)[0].number == 2


def test_another_process_of_the_same_pid_is_not_the_supervisor(files, store):
    earlier = process_start(os.getpid()) - 1
    store.add(KEYS.attempt, dumps(attempt_of(4, pid=os.getpid(), start=earlier)))
    assert take(files, store)[0].number == 5


@pytest.mark.parametrize("damage", [b"{", b"\xff\x00", b"[]", b'{"number": "x"}', b""])
def test_a_damaged_key_is_overwritten_by_the_next_attempt(files, store, caplog, damage):
    for number in (1, 2):
        assert take(files, store)[0].number == number
        end(files, number)
        store.add(KEYS.attempt, damage, replace=True)
        store.add(KEYS.component_order, damage)
        store.add(KEYS.scaling, damage)
    record, _ = take(files, store)
    assert record.number == 3
    assert loads(AttemptRecord, store.get(KEYS.attempt).value, where="") == record
    assert f"the key '{KEYS.attempt}' holds no AttemptRecord" in caplog.text
    assert store.find_subtree(KEYS.component_order) == store.find_subtree(KEYS.scaling) == []


def test_a_damaged_key_does_not_hide_an_attempt_that_lives(files, store):
    take(files, store)
    store.add(KEYS.attempt, b"{", replace=True)
    with golden.raises(TrialIsLive):
        take(files, store)


def test_a_damaged_key_is_named_with_what_mends_it():
    with golden.raises(TrialError) as told:
        loads(AttemptRecord, b"{", where=KEYS.attempt)
    assert told.value.fix.endswith(f"etcdctl del '/{KEYS.attempt}'")


# ---- the name of a removed trial --------------------------------------------------------------------


def launched(files, at):
    record = TrialRecord(
        experiment_name="ppo-math", trial_name="run1", user="anna", cluster="local", plan_hash="h",
        created_at=at, launch_host="login1",
    )  # fmt: skip
    write_record(files.record, record)


def test_a_trial_of_the_name_of_a_removed_one_begins_with_attempt_1_and_a_clean_store(files, store):
    pid, start = gone_process()
    store.add(KEYS.attempt, dumps(attempt_of(3, pid=pid, start=start)))  # started at 1.0
    left = [KEYS.component_order, KEYS.checkpoint("main"), KEYS.saved_model("actor"), KEYS.done]
    for key in left:
        store.add(key, b"of the removed one")
    launched(files, at=2.0)
    assert take(files, store)[0].number == 1
    assert store.find_subtree(KEYS.root) == [KEYS.attempt]
    end(files, 1)
    assert take(files, store)[0].number == 2


def test_a_removed_trial_that_runs_on_is_not_replaced(files, store):
    still = attempt_of(3, pid=os.getpid(), start=process_start(os.getpid()))
    store.add(KEYS.attempt, dumps(still))
    launched(files, at=2.0)
    with golden.raises(TrialIsLive):
        take(files, store)


# ---- a race ---------------------------------------------------------------------------------------


class Overtaken:
    """A store in which somebody else acts between our look and our write."""

    def __init__(self, store, act):
        self._store, self._act = store, act

    def transaction(self, *args, **kwargs):
        self._act()
        return self._store.transaction(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize("earlier", [0, 1], ids=["the first attempt", "a later one"])
def test_who_is_overtaken_gets_nothing(files, store, earlier):
    for number in range(1, earlier + 1):
        take(files, store)
        end(files, number)
    number = earlier + 1
    winner = dumps(attempt_of(number, pid=os.getpid(), start=1, host="another"))
    with golden.raises(TrialIsLive):
        take(files, Overtaken(store, lambda: store.add(KEYS.attempt, winner, replace=True)))
    assert store.get(KEYS.attempt).value == winner
    assert not files.attempt(number).root.exists()


class OvertakenLater(Overtaken):
    """The same, after so many transactions."""

    def __init__(self, store, act, *, after):
        super().__init__(store, act)
        self.left = after

    def transaction(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            return super().transaction(*args, **kwargs)
        return self._store.transaction(*args, **kwargs)


def test_who_is_overtaken_while_it_tidies_forgets_nothing_of_the_newer_one(files, store):
    take(files, store)
    end(files, 1)
    newer = dumps(attempt_of(3, pid=os.getpid(), start=1, host="another"))
    worker = KEYS.worker("model_worker", 0)
    store.add(worker, b"of attempt 1")

    def take_over():
        store.add(KEYS.attempt, newer, replace=True)
        store.add(worker, b"of attempt 3", replace=True)

    with golden.raises(StaleAttempt):
        take(files, OvertakenLater(store, take_over, after=1))
    assert store.get(worker).value == b"of attempt 3"


def test_whose_folder_is_taken_gets_nothing(files, store, monkeypatch):
    """As where each attempt has a store of its own: the folder is all they share."""
    elsewhere(files, 1)
    monkeypatch.setattr(TrialFiles, "all_attempts", lambda self: [])
    with golden.raises(TrialIsLive):
        take(files, store)
    with pytest.raises(KeyNotFound):
        store.get(KEYS.attempt)


def test_a_folder_that_can_not_be_made_leaves_nothing(files, store, monkeypatch):
    def rename(*_):
        raise OSError(errno.EIO, "it broke")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="broke"):
        take(files, store)
    assert list(files.attempts.iterdir()) == []


def test_an_attempt_that_got_no_further_than_its_folder_does_not_stop_the_next(files, store):
    files.attempt(1).root.mkdir(parents=True)
    assert take(files, store)[0].number == 2


def test_each_attempt_has_its_own_keys_for_sockets(files, store):
    keys = []
    for number in (1, 2):
        attempt = take(files, store)[1]
        keys.append(TrialKeypairs.load(attempt.curve_keys))
        assert attempt.secrets.stat().st_mode & 0o777 == 0o700
        end(files, number)
    assert keys[0].server_public != keys[1].server_public
    assert keys[0].client_public != keys[1].client_public


def elsewhere(files, number):
    """An attempt that another host began and that has said nothing since."""
    root = files.attempt(number).root
    root.mkdir(parents=True)
    write_record(files.attempt(number).record, attempt_of(number, pid=1, start=1, host="other"))


def test_a_former_store_with_leases_means_that_it_lives(files, store, monkeypatch):
    monkeypatch.setattr("realsys.supervisor.attempt.attempt.MANY_TTL_S", 0.0)
    monkeypatch.setattr("realsys.supervisor.attempt.attempt.LEASE_SLACK_S", 0.1)
    elsewhere(files, 1)
    former = open_store("memory://former")
    former.add(KEYS.worker("model_worker", 0), b"x", lease=former.grant(60.0), replace=True)

    def take_it():
        # It is closed by who asked for it: a new one each time.
        find = lambda attempt: open_store("memory://former")  # noqa: E731
        return claim_attempt(files, store, KEYS, job=Job(), former=find)

    with golden.raises(TrialIsLive):
        take_it()
    monkeypatch.setattr("realsys.supervisor.attempt.attempt.LEASE_SLACK_S", 60.0)
    ends = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 2.0)  # while they are waited for
    ends.sleep = lambda seconds: former.delete(KEYS.worker("model_worker", 0))
    monkeypatch.setattr("realsys.supervisor.attempt.attempt.time", ends)
    assert take_it()[0].number == 2


def test_a_former_store_that_is_gone_means_that_it_is_over(files, store):
    elsewhere(files, 1)
    assert claim_attempt(files, store, KEYS, job=Job(), former=lambda attempt: None)[0].number == 2


def test_of_many_at_the_same_moment_one_wins(files, store):
    count = 6
    barrier, outcomes = threading.Barrier(count), []

    def supervisor():
        barrier.wait(60.0)
        try:
            outcomes.append(take(files, store)[0].number)
        except TrialIsLive:
            outcomes.append(None)

    threads = [threading.Thread(target=supervisor, name=f"supervisor {i}") for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(outcomes, key=str) == [1] + [None] * (count - 1)
    assert [a.number for a in files.all_attempts()] == [1]


# ---- its end ----------------------------------------------------------------------------------------


def test_an_end_is_told_and_the_next_attempt_goes_on_counting(files, store):
    record, _ = take(files, store)
    end_attempt(store, KEYS, record)
    told = loads(AttemptRecord, store.get(KEYS.attempt).value, where="here")
    assert told.ended_at is not None
    assert replace(told, ended_at=None) == record
    end(files, 1)
    assert take(files, store)[0].number == 2


def test_an_end_that_was_told_twice_is_told_once(files, store):
    record, _ = take(files, store)
    end_attempt(store, KEYS, record)
    told = store.get(KEYS.attempt)
    end_attempt(store, KEYS, record)
    assert store.get(KEYS.attempt) == told


def test_nobody_ends_a_newer_attempt(files, store):
    first, _ = take(files, store)
    end(files, 1)
    second, _ = take(files, store)
    end_attempt(store, KEYS, first)
    assert store.get(KEYS.attempt).value == dumps(second)


def test_an_end_without_a_store_is_a_warning(files, store, caplog):
    record, _ = take(files, store)

    def away():
        raise StoreUnavailable("no route to host", where="etcd", fix="start it")

    end_attempt(Overtaken(store, away), KEYS, record)
    golden.check(caplog.text)
    assert store.get(KEYS.attempt).value == dumps(record)


def test_an_end_leaves_nothing_behind_where_the_trial_was_cleared(files, store):
    record, _ = take(files, store)
    store.delete(KEYS.attempt)
    end_attempt(store, KEYS, record)
    with pytest.raises(KeyNotFound):
        store.get(KEYS.attempt)
