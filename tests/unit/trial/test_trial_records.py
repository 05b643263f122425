"""A trial's folder and records: one place for each path, whole files, damage told."""

import errno
import json
import os
import re
from pathlib import Path

import golden
import pytest

from realsys.api.errors import TrialError
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    Progress,
    Result,
    Resumed,
    StopRequest,
    TrialFiles,
    TrialRecord,
    WorkerRecord,
    WorkerStatus,
    dumps,
    fresh,
    is_alive,
    is_there,
    loads,
    process_start,
    read_fresh,
    read_record,
    replace_symlink,
    trial_dir,
    write_record,
)
from realsys.trial.temporary_names import replace_text, temporary_beside

FAILURE = Failure(
    worker="model_worker/0", host="n1", pid=7, why="ü\nb", at=1.5, kind="DataError", log_tail=("a",)
)
RECORDS = [
    TrialRecord(
        experiment_name="ppo-math",
        trial_name="run1",
        user="anna",
        cluster="local",
        plan_hash="ab",
        created_at=1.25,
        launch_host="n1",
        command=("realsys", "launch"),
    ),
    AttemptRecord(
        number=2, token="ff", host="n1", supervisor_pid=7, supervisor_start=99, started_at=0.5
    ),
    FAILURE,
    ExitMarker(
        result=Result.FAILED,
        attempt=2,
        ended_at=3.0,
        phase="main",
        step=4,
        first_failure=FAILURE,
        other_failures=(FAILURE, FAILURE),
    ),
    WorkerRecord(worker="model_worker/0", host="n1", pid=1, start=2, attempt=3, token="t"),
    WorkerStatus(state="running", mfc="actor_gen", step=3),
    Progress(
        attempt=1,
        phase="main",
        step=3,
        total_steps=9,
        running={"actor_gen": "model_worker/0"},
        headline={"reward": 0.5},
    ),
    StopRequest(grace_seconds=5.0, by="anna", at=1.0, attempt=2),
    Resumed(attempt=2, phase="main", step=10, of_attempt=1),
    AttemptRecord(
        number=2,
        token="ff",
        host="n1",
        supervisor_pid=7,
        supervisor_start=99,
        started_at=0.5,
        ended_at=9.25,
    ),
]
all_records = pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)


@all_records
def test_a_record_comes_back_from_a_file_and_from_bytes(record, tmp_path):
    path = tmp_path / "deep" / "record.json"
    write_record(path, record)
    assert read_record(type(record), path) == record
    assert loads(type(record), dumps(record), where="key") == record
    golden.check(dumps(record).decode())  # with the fields that are not given


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b"[1]", b"\xff", b'{"no_such_field": 1}', b"{}"),
        b'{"number": ' + b"[" * 100_000,  # deeper than a stack
        b'{"number": 1, "token": "t", "host": "h", "supervisor_pid": 1, "supervisor_start": 1, '
        b'"started_at": 1' + b"0" * 400 + b"}",  # larger than a float
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_a_damaged_record_is_a_trial_error_with_its_path(content, tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(TrialError) as refused:
        read_record(AttemptRecord, path)
    assert str(path) in refused.value.where


@pytest.mark.parametrize("content", [b"{", b"{}"])
def test_a_damaged_key_says_how_to_remove_it(content):
    key = "realsys/v1/site/anna/ppo-math/run1/worker/model_worker/0"
    with golden.raises(TrialError) as refused:
        loads(WorkerRecord, content, where=key)
    assert refused.value.where == key
    with golden.raises(TrialError):
        loads(WorkerRecord, content, where="a.json")


def test_no_record_is_none(tmp_path):
    assert read_record(TrialRecord, tmp_path / "none" / "trial.json") is None


def test_a_record_is_json_that_a_person_can_read(tmp_path):
    write_record(tmp_path / "r.json", RECORDS[2])
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text)["why"] == "ü\nb"
    assert "ü" in text
    assert text.endswith("}\n")


def test_a_record_that_can_t_be_written_leaves_the_old_one_and_no_scraps(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    write_record(path, RECORDS[5])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with golden.raises(OSError):
        write_record(path, RECORDS[6])
    assert read_record(WorkerStatus, path) == RECORDS[5]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_record_is_never_seen_half_written(tmp_path, monkeypatch):
    path, seen = tmp_path / "r.json", []
    write_record(path, RECORDS[5])
    replace = os.replace

    def look_and_replace(source, target):
        seen.append((read_record(WorkerStatus, path), Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    write_record(path, WorkerStatus(state="done"))
    ((before, whole),) = seen
    assert before == RECORDS[5]  # until the rename the old one is there
    assert json.loads(whole)["state"] == "done"  # and the new one is whole beside it


# ---- paths ----------------------------------------------------------------------------------------


def test_every_path_lies_under_the_trial():
    files = TrialFiles(trial_dir("/lustre", "anna", "ppo-math", "run1"))
    assert str(files.plan) == "/lustre/runs/anna/ppo-math/run1/plan.json"
    attempt = files.attempt(3)
    assert str(attempt.record) == "/lustre/runs/anna/ppo-math/run1/attempts/0003/attempt.json"
    assert attempt.number == 3
    assert attempt.log("model_worker/3").name == "model_worker-3.log"
    assert attempt.failure_record("model_worker/3").parent == attempt.failure_records
    assert attempt.done("main") == attempt.root / "done-main.json"
    assert attempt.resumed("sft") == attempt.root / "resumed-sft.json"
    phase = TrialFiles.phase("/p")
    assert str(phase.recover) == "/p/recover"
    assert str(phase.rows_of(3).metrics) == "/p/rows/0003/metrics.jsonl"
    assert files.plan_of("0123456789abcdef") == files.plans / "0123456789ab.json"
    assert attempt.stacks_of("model_worker/3") == attempt.stacks / "model_worker-3.txt"
    assert attempt.exit_of("model_worker/3") == attempt.exits / "model_worker-3.json"
    assert attempt.place_of("model_worker/3") == attempt.hosts / "model_worker-3.json"
    assert attempt.end_of("model_worker/3", "main", 2).name == "model_worker-3.end-main-2"
    assert attempt.curve_keys.parent == attempt.secrets == attempt.root / "secrets"


def test_attempts_are_listed_oldest_first(tmp_path):
    files = TrialFiles(tmp_path)
    assert files.all_attempts() == []
    for name in ("0002", "0010", "0001", "latest", ".0003"):
        (files.attempts / name).mkdir(parents=True)
    assert [a.number for a in files.all_attempts()] == [1, 2, 10]


def test_attempts_beyond_9999_are_still_the_newest(tmp_path):
    files = TrialFiles(tmp_path)
    for number in (10_000, 9_999):
        files.attempt(number).root.mkdir(parents=True)
    assert files.all_attempts()[-1] == AttemptFiles(files.attempts / "10000")


def test_a_folder_that_seems_missing_is_looked_for_from_above(tmp_path, monkeypatch):
    """An NFS client remembers what was not there, until what it lies in is opened."""
    opened, open_file, flags = [], os.open, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

    def note(path, how, dir_fd=None):
        assert (how, dir_fd) == (flags, None)
        opened.append(str(Path(path).relative_to(tmp_path)))
        return open_file(path, how)

    monkeypatch.setattr(os, "open", note)
    before = len(os.listdir("/proc/self/fd"))
    fresh(tmp_path / "a" / "b")
    assert opened == ["a/b", "a", ".", "a", "a/b"]
    opened.clear()
    (tmp_path / "a").write_text("a file")
    for path, looked in (("a", ["a"]), ("a/b", ["a/b"])):
        fresh(tmp_path / path)
        assert [opened.pop(0)] == looked
    (tmp_path / "c").mkdir()
    for look in (fresh, lambda c: is_there(c / "x"), lambda c: read_fresh(TrialRecord, c / "x")):
        look(tmp_path / "c")
        assert [opened.pop() for _ in opened[:1]] == ["c"]
    fresh(tmp_path / "c")
    assert (opened, len(os.listdir("/proc/self/fd"))) == (["c"], before)


# ---- processes --------------------------------------------------------------------------------------


def test_a_process_is_named_by_pid_and_start():
    start = process_start(os.getpid())
    assert start is not None
    assert is_alive(os.getpid(), start)
    assert not is_alive(os.getpid(), start - 1)  # an earlier process of the same pid


def test_a_process_that_is_gone_or_a_zombie_is_not_alive():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, not yet waited for: a zombie
    assert process_start(pid) is None
    os.waitpid(pid, 0)
    assert process_start(pid) is None


def test_processes_with_one_pid_that_replace_a_link_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, replace, replaced = tmp_path / "latest", os.replace, []

    def replace_after_another(source: str, target: str) -> None:
        replaced.append(target)
        if len(replaced) == 1:
            replace_symlink(link, "second")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_another)
    replace_symlink(link, "first")
    assert os.readlink(link) == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    monkeypatch.undo()
    link.unlink()
    link.mkdir()
    for write in (replace_symlink, replace_text):
        with pytest.raises(OSError, match="directory"):
            write(link, "first")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    link.rmdir()
    replace_text(link, "ü")
    assert link.read_bytes() == "ü".encode()
    assert re.fullmatch(r"\.latest\.[0-9a-f]{16}", temporary_beside(link).name)
