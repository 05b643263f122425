"""What `status` and `explain` say when the store, the plan or a record can't be read, or a step does not
start: what is known, how old it is, and what is not known. Never that a run which is at step 35 starts.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from stand_in_slurm import SUBMITTED, make_plan, program, queue_row, write_plan

from launcher.terminal.exit_codes import ExitCode
from launcher.terminal.text import duration
from launcher.trials import status
from launcher.trials.explain import explain
from launcher.trials.status import StatusReader
from launcher.trials.submission import Submission
from launcher.trials.trial_view import SILENT_S, TrialView
from realsys.api.errors import KeyNotFound, StoreUnavailable
from realsys.api.plan import LaunchPlan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Entry
from realsys.observability.jsonl import JsonlAppender
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    Progress,
    Result,
    Resumed,
    TrialFiles,
    WorkerRecord,
    dumps,
    process_start,
    write_record,
)
from realsys.trial.trial_state import State

ME = {
    "host": socket.gethostname(),
    "supervisor_pid": os.getpid(),
    "supervisor_start": process_start(os.getpid()) or 0,
}
ELSEWHERE = {"host": "n1", "supervisor_pid": 5, "supervisor_start": 1}
BUSY = "Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"


def begin(files: TrialFiles, *, step: int = 0, job_id: str = "", **who: object) -> None:
    """Attempt 1; its master has begun, and has done ``step`` steps 40 s ago."""
    record = AttemptRecord(number=1, token="t", started_at=1.0, job_id=job_id, **who)  # type: ignore[arg-type]
    attempt = files.attempt(1)
    write_record(attempt.record, record)
    write_record(attempt.resumed("main"), Resumed(attempt=1, phase="main", step=0))
    if step:
        rows = TrialFiles.phase(files.root).rows_of(1).metrics
        rows.parent.mkdir(parents=True)
        with JsonlAppender(rows) as file:
            file.append({"step": step, "reward": 0.5})
        at = status.time.time() - 40
        os.utime(rows, (at, at))


@pytest.fixture(autouse=True)
def _still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was 40 s ago stays so while a test runs."""
    now = time.time()
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: now))


def look(files: TrialFiles) -> TrialView:
    with closing(StatusReader(files)) as reader:
        return reader.view()


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return replace(make_plan(tmp_path), job=None)


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise StoreUnavailable("etcd did not answer in 10.0 s", where="etcd://s1", fix="wait")

    monkeypatch.setattr("realsys.name_resolve.trial_store.open_trial_store", refuse)


def test_a_run_at_step_35_whose_store_is_away_runs_and_its_workers_are_not_known(
    plan: LaunchPlan, no_store: None
) -> None:
    files = write_plan(plan)
    begin(files, step=35, **ME)
    view = look(files)
    assert (view.state, view.step) == (State.RUNNING, 35)
    golden.check(view.reason)
    assert {w.state for w in view.workers} == {"not known"}
    assert view.known_at is not None
    told = "\n".join(explain(view))
    golden.check(told)
    assert "not registered" not in told
    assert "nothing; watch it" not in told


def test_a_run_that_has_not_done_a_step_is_not_called_starting_once_its_master_works(
    plan: LaunchPlan, no_store: None
) -> None:
    files = write_plan(plan)
    begin(files, **ME)
    view = look(files)
    assert view.state is State.RUNNING
    golden.check(view.reason)
    files.attempt(1).resumed("main").unlink()
    view = look(files)
    assert view.state is State.STARTING
    golden.check(view.reason)
    assert {w.state for w in view.workers} == {"not known"}


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_plan_that_cant_be_read_hides_no_run(plan: LaunchPlan, content: str | None) -> None:
    files = write_plan(plan)
    begin(files, step=35, **ME)
    if content is None:
        files.plan.unlink()
        files.plan.mkdir()  # any error of the file system
    else:
        files.plan.write_text(content)
    view = look(files)
    assert (view.state, view.step) == (State.RUNNING, 35)
    golden.check(view.reason)


def test_an_attempt_whose_record_cant_be_read_is_not_a_trial_that_was_never_started(
    plan: LaunchPlan,
) -> None:
    files = write_plan(plan)
    begin(files, step=35, **ME)
    files.attempt(1).record.write_text("{")
    view = look(files)
    assert (view.state, view.attempt, view.step) == (State.UNKNOWN, 1, 35)
    golden.check(view.reason)


@pytest.mark.parametrize(
    ("written", "step", "age"), [(0, 35, "1 min 40 s"), (30, 35, "40 s"), (40, 40, "40 s")]
)
def test_who_watches_keeps_what_was_read_before(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch, written: int, step: int, age: str
) -> None:
    """``written``: the last step whose row was written 60 s later; the later of both steps is told."""
    files = write_plan(plan)
    begin(files, step=written, **ME)
    now = status.time.time()
    progress = Progress(
        attempt=1,
        phase="main",
        step=35,
        total_steps=100,
        running={"actor_gen": "model_worker/0"},
        headline={"reward": 0.5},
        eta_seconds=60.0,
        updated_at=now - 100,
    )
    worker = WorkerRecord(
        worker="model_worker/0",
        host=str(ME["host"]),
        pid=os.getpid(),
        start=process_start(os.getpid()) or 0,
        attempt=1,
        token="t",
    )
    with (
        closing(open_store(plan.name_resolve_url)) as store,
        closing(StatusReader(files)) as reader,
    ):
        store.add(TrialKeys.of(plan).progress, dumps(progress))
        store.add(TrialKeys.of(plan).worker("model_worker", 0), dumps(worker))
        assert reader.view().progress == progress
        opened = reader._store
        assert opened is not None

        def away(prefix: str) -> None:
            raise StoreUnavailable("etcd did not answer in 10.0 s", where="etcd://s1", fix="wait")

        monkeypatch.setattr(opened, "get_subtree", away)
        view = reader.view()
    assert (view.state, view.step, view.total_steps) == (State.RUNNING, step, 100)
    assert view.progress is not None
    assert (view.progress.running, view.progress.eta_seconds) == (
        {},
        None,
    )  # of that nothing is known
    assert view.progress.headline == {"reward": 0.5}
    assert f", {age} ago" in view.reason


class Etcd:
    """A job's own etcd; it knows how far the run is."""

    def __init__(self, step: int) -> None:
        progress = Progress(attempt=step // 10, phase="main", step=step, total_steps=100)
        self.progress, self.is_closed = dumps(progress), False

    def get_subtree(self, prefix: str) -> list[Entry]:
        return []

    def get(self, key: str) -> Entry:
        if not key.endswith("/progress"):
            raise KeyNotFound(f"no key {key}", where="etcd", fix="none")
        return Entry(key=key, value=self.progress, revision=1, version=1)

    def close(self) -> None:
        self.is_closed = True


def test_each_attempt_of_a_job_with_an_etcd_of_its_own_is_read_from_its_own(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that watches through a requeue asked the etcd of the attempt before, which is gone."""
    spec = replace(plan.cluster, name_resolve="etcd+job://")
    files = write_plan(replace(plan, cluster=spec))
    stores: list[Etcd] = []

    def opened(plan: LaunchPlan, attempt: AttemptFiles) -> Etcd:
        stores.append(Etcd(attempt.number * 10))
        return stores[-1]

    monkeypatch.setattr("realsys.name_resolve.trial_store.open_trial_store", opened)
    with closing(StatusReader(files)) as reader:
        for number in (1, 2):
            record = AttemptRecord(number=number, token="t", started_at=1.0, **ME)  # type: ignore[arg-type]
            write_record(files.attempt(number).record, record)
            view = reader.view()  # its etcd has not started yet: that is no trouble
            assert (view.state, view.reason, view.notes) == (State.STARTING, "", ())
            files.attempt(number).secrets.mkdir()
            files.attempt(number).etcd_access.touch()
            assert [reader.view().step, reader.view().step] == [number * 10] * 2
    assert [store.is_closed for store in stores] == [True, True]


# ---- on Slurm -------------------------------------------------------------------------------------


@pytest.fixture
def on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialFiles:
    """A trial that job 7 runs, as squeue says."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program(tmp_path / "bin", "sacct", "exit 1")
    (tmp_path / "bin" / "queue").write_text(queue_row("7", "RUNNING"))
    program(tmp_path / "bin", "squeue", f'cat "{tmp_path}/bin/queue"')
    files = write_plan(make_plan(tmp_path))
    note = Submission(
        job_id="7", scheduler="slurm", job_ids=("7",), host="login", after_attempt=0, at=SUBMITTED
    )
    write_record(files.submission, note)
    return files


def test_a_job_that_runs_while_the_store_is_away(on_slurm: TrialFiles, no_store: None) -> None:
    begin(on_slurm, step=35, job_id="7", **ELSEWHERE)
    view = look(on_slurm)
    assert (view.state, view.step) == (State.RUNNING, 35)
    golden.check(view.reason)


def test_neither_slurm_nor_the_store_answers(
    on_slurm: TrialFiles, no_store: None, tmp_path: Path
) -> None:
    begin(on_slurm, step=35, job_id="7", **ELSEWHERE)
    program(tmp_path / "bin", "squeue", "echo 'squeue: error: Socket timed out' >&2; exit 1")
    view = look(on_slurm)
    assert (view.state, view.is_over) == (State.UNKNOWN, False)
    golden.check(view.reason)
    assert "no worker holds a lease" not in view.reason  # nobody knows


def test_a_step_that_srun_cant_start_is_told_with_its_sentence(on_slurm: TrialFiles) -> None:
    begin(on_slurm, job_id="7", **ELSEWHERE)
    logs = on_slurm.attempt(1).logs
    logs.mkdir()
    (logs / "srun-model_worker.log").write_text(f"srun: {BUSY}\n")
    (logs / "master_worker-0.log").write_text("hello\n")
    view = look(on_slurm)
    golden.check(view.reason)
    golden.check(view)
    told = list(explain(view))
    golden.check(told)
    assert not [line for line in told if "nothing; watch it" in line]
    # Started a moment later: nothing is left of it.
    with (logs / "srun-model_worker.log").open("a") as log:
        log.write("srun: Step created for StepId=7.1\n")
    (logs / "model_worker-0.log").touch()
    (logs / "model_worker-1.log").touch()
    assert look(on_slurm).reason == ""


def test_a_step_of_which_nothing_is_seen_is_told_before_srun_says_a_word(
    on_slurm: TrialFiles,
) -> None:
    begin(on_slurm, job_id="7", **ELSEWHERE)
    on_slurm.attempt(1).logs.mkdir()
    (on_slurm.attempt(1).logs / "master_worker-0.log").touch()
    assert look(on_slurm).reason == ""  # of the layout split: srun has not been asked yet
    (on_slurm.attempt(1).logs / "srun-model_worker.log").touch()
    view = look(on_slurm)
    assert view.reason.startswith("srun has not started model_worker for ")
    assert not [line for line in explain(view) if "nothing; watch it" in line]


@pytest.mark.parametrize("age_s", [SILENT_S - 1, SILENT_S + 1, 100.0])
def test_srun_has_a_while_before_its_silence_is_told_with_how_long_it_lasts(
    on_slurm: TrialFiles, age_s: float
) -> None:
    begin(on_slurm, job_id="7", **ELSEWHERE)
    attempt, began = on_slurm.attempt(1), status.time.time() - age_s
    record = AttemptRecord(number=1, token="t", started_at=began, job_id="7", **ELSEWHERE)  # type: ignore[arg-type]
    write_record(attempt.record, record)
    attempt.logs.mkdir()
    (attempt.logs / "srun-model_worker.log").touch()
    told = (
        f"srun has not started model_worker for {duration(age_s)} and has not printed a cause yet"
    )
    assert look(on_slurm).reason == (told if age_s > SILENT_S else "")


def test_logs_of_a_worker_that_srun_has_not_started_points_to_sruns(
    on_slurm: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.cli.command_line import run

    begin(on_slurm, job_id="7", **ELSEWHERE)
    logs = on_slurm.attempt(1).logs
    logs.mkdir()
    (logs / "srun-generation_server.log").write_text("srun: unrecognized option '--x'\n")
    assert run(["logs", str(on_slurm.root), "generation_server"]) == ExitCode.RUN_FAILED
    told = capsys.readouterr().err
    golden.check(told)
    assert "srun-generation_server" in told
    assert run(["logs", str(on_slurm.root), "srun-generation_server"]) == ExitCode.OK
    assert "unrecognized option '--x'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "fix"),
    [
        ("", "realsys resume ppo-math/run1"),
        ("/l", "read its log, then realsys resume ppo-math/run1"),
    ],
)
def test_a_log_is_named_only_if_there_is_one(on_slurm: TrialFiles, log: str, fix: str) -> None:
    begin(on_slurm, job_id="7", **ELSEWHERE)
    failure = Failure(worker="m/0", host="n1", pid=0, why="was not started", at=1.0, log=log)
    marker = ExitMarker(
        result=Result.FAILED, attempt=1, ended_at=2.0, phase="main", first_failure=failure
    )
    write_record(on_slurm.attempt(1).exit, marker)
    assert look(on_slurm).fix == fix


def test_the_batch_scripts_log_is_named_only_if_there_is_one(
    on_slurm: TrialFiles, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "queue").write_text(queue_row("7", "FAILED", "3:0"))
    assert look(on_slurm).fix == "realsys resume ppo-math/run1"
    log = on_slurm.submitit / "7_0_log.err"
    log.write_text("module: command not found\n")
    golden.check(look(on_slurm))


# ---- disks ----------------------------------------------------------------------------------------


class Disk:
    """What statvfs says."""

    f_frsize, f_bavail, f_files, f_favail = 4096, 1 << 20, 1000, 500

    def __init__(self, **changes: int) -> None:
        for name, value in changes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("disk", "left"),
    [
        (Disk(), ""),
        (Disk(f_bavail=0), "no space left"),
        (Disk(f_bavail=300), "no space left"),  # what the supervisor has freed to end, and no more
        (Disk(f_favail=0), "no room for another file left"),
        (Disk(f_files=0, f_favail=0), ""),  # a file system that has no such number
    ],
)
def test_a_run_that_was_lost_on_a_full_disk_says_so(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch, disk: Disk, left: str
) -> None:
    files = write_plan(plan)
    begin(files, host=ME["host"], supervisor_pid=1 << 22, supervisor_start=1)
    monkeypatch.setattr("launcher.trials.status.os.statvfs", lambda folder: disk)
    view = look(files)
    assert view.state is State.LOST
    told = f"{left} on the disk of {files.root}: free some, then resume"
    assert (told in view.reason) is bool(left)
    assert (told in view.notes) is bool(left)
    assert view.fix == "realsys resume ppo-math/run1"


def test_a_full_disk_of_the_store_shows_while_the_run_lives(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "other disk"
    url = f"file://{str(place).replace(' ', '%20')}"
    files = write_plan(replace(plan, cluster=replace(plan.cluster, name_resolve=url)))
    begin(files, **ME)
    full = {str(place): Disk(f_bavail=0)}
    monkeypatch.setattr(
        "launcher.trials.status.os.statvfs", lambda folder: full.get(str(folder), Disk())
    )
    view = look(files)
    assert view.state in State.live()
    golden.check(view.notes)


def test_a_job_that_ended_on_a_full_disk_says_so_beside_what_slurm_says(
    on_slurm: TrialFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(on_slurm, job_id="7", **ELSEWHERE)
    (tmp_path / "bin" / "queue").write_text(queue_row("7", "FAILED", "1:0"))
    monkeypatch.setattr("launcher.trials.status.os.statvfs", lambda folder: Disk(f_bavail=0))
    view = look(on_slurm)
    assert view.state is State.LOST
    golden.check(view.reason)
