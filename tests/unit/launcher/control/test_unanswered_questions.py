"""Slurm or the store does not answer for a while: nobody takes that for the run's end.

squeue and scancel are scripts; the verbs are the command line's own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from stand_in_slurm import SUBMITTED, calls, make_plan, program, queue_row, write_plan

from launcher.cli.verbs.run_verbs import wait
from launcher.control import stop as stop_module
from launcher.control.stop import stop
from launcher.terminal.exit_codes import ExitCode
from launcher.trials.status import StatusReader
from launcher.trials.submission import Submission
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Result,
    TrialFiles,
    process_start,
    write_record,
)
from realsys.trial.trial_state import State

SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2"


def submission(job_id: str = "7", after: int = 0) -> Submission:
    ids = (job_id,)
    return Submission(
        job_id=job_id,
        scheduler="slurm",
        job_ids=ids,
        host="login",
        after_attempt=after,
        at=SUBMITTED,
    )


def attempt(number: int = 1, job_id: str = "7", **more: object) -> AttemptRecord:
    base = AttemptRecord(
        number=number,
        token="t",
        host="n1",
        supervisor_pid=5,
        supervisor_start=1,
        started_at=SUBMITTED + 2.0,
        job_id=job_id,
        nodes="n[1-2]",
    )
    return replace(base, **more)  # type: ignore[arg-type]


def marker(result: Result, number: int = 1) -> ExitMarker:
    return ExitMarker(result=result, attempt=number, ended_at=SUBMITTED + 3.0, phase="main")


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("launcher.trials.status.WATCH_AGE_S", 0.05)
    monkeypatch.setattr("launcher.trials.await_end.POLL_S", 0.02)
    program(tmp_path / "bin", "sacct", "exit 1")
    return tmp_path / "bin"


@pytest.fixture
def trial(tmp_path: Path) -> TrialFiles:
    """Submitted to Slurm as job 7, nothing else."""
    files = write_plan(make_plan(tmp_path))
    write_record(files.submission, submission())
    return files


# ---- a question that is not answered --------------------------------------------------------------


def test_a_wait_for_a_queued_job_outlasts_a_slurmctld_that_is_away(
    bin_folder: Path, trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first looks are not answered; then the job waits, runs and completes."""
    write_record(bin_folder / "attempt.json", attempt())
    write_record(bin_folder / "exit.json", marker(Result.COMPLETED))
    (bin_folder / "pending").write_text(queue_row("7", "PENDING"))
    (bin_folder / "completed").write_text(queue_row("7", "COMPLETED"))
    folder = trial.attempt(1).root
    takes = f'mkdir -p "{folder}"; cp "{bin_folder}"/*.json "{folder}"'
    program(
        bin_folder,
        "squeue",
        f'n=$(wc -l < "{bin_folder}/squeue.calls")\n'
        f"if [ $n -le 2 ]; then {SILENT}; exit 1; fi\n"
        f'if [ $n -le 3 ]; then cat "{bin_folder}/pending"; exit; fi\n'
        f'{takes}; cat "{bin_folder}/completed"',
    )
    assert wait(str(trial.root), timeout=250.0) is ExitCode.OK
    told = capsys.readouterr().err
    golden.check(told)
    assert "run1 completed" in told


def test_a_run_on_another_host_without_a_slurm_is_not_waited_for(tmp_path: Path) -> None:
    files = write_plan(replace(make_plan(tmp_path), job=None))
    write_record(files.attempt(1).record, attempt(host="elsewhere"))
    with closing(StatusReader(files)) as reader:
        view = reader.view()
    assert (view.state, view.is_over) == (State.UNKNOWN, True)


# ---- a stop whose request can't be written --------------------------------------------------------


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses for a moment."""
    from realsys.api.errors import StoreUnavailable

    def refuse(*args: object) -> None:
        raise StoreUnavailable("the store does not answer", where="here", fix="wait")

    monkeypatch.setattr("launcher.control.stop.open_trial_store", refuse)


def test_a_stop_that_the_store_does_not_take_goes_through_slurm_and_kills_nobody(
    bin_folder: Path, trial: TrialFiles, no_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "POLL_PAUSES_S", (0.01,))
    write_record(trial.attempt(1).record, attempt())
    write_record(bin_folder / "exit.json", marker(Result.STOPPED))
    (bin_folder / "queue").write_text(queue_row("7", "RUNNING"))
    (bin_folder / "ended").write_text(queue_row("7", "COMPLETED"))
    program(bin_folder, "squeue", f'cat "{bin_folder}/queue"')
    honours = f'cp "{bin_folder}/exit.json" "{trial.attempt(1).root}"; '
    honours += f'cp "{bin_folder}/ended" "{bin_folder}/queue"'
    program(bin_folder, "scancel", f'if [ "$2" = --signal=TERM ]; then {honours}; fi')
    report = stop(trial, grace_s=100.0)
    assert report.view.state is State.STOPPED
    assert calls(bin_folder, "scancel") == ["--batch --signal=TERM 7"]
    golden.check(report.actions)


SUPERVISOR = """
import os, signal, sys
from pathlib import Path
def end(number, frame):
    Path(sys.argv[1]).rename(sys.argv[2])
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends the attempt as a supervisor does when it is asked by SIGTERM."""
    write_record(tmp_path / "exit.json", marker(Result.STOPPED))
    argv = [str(tmp_path / "exit.json"), str(tmp_path / "run1/attempts/0001/exit.json")]
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, *argv], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_on_this_machine_the_supervisor_alone_is_asked_by_a_signal(
    tmp_path: Path,
    supervisor: subprocess.Popen[bytes],
    no_store: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that lives is not signalled: it lets its step end."""
    monkeypatch.setattr(stop_module, "QUIET_S", 0.2)
    files = write_plan(replace(make_plan(tmp_path), job=None))
    me = attempt(
        host=socket.gethostname(),
        supervisor_pid=supervisor.pid,
        supervisor_start=process_start(supervisor.pid) or 0,
    )
    write_record(files.attempt(1).record, me)
    link = tmp_path / "link"  # by which the worker names the folder
    link.symlink_to(files.root)
    environment = {**os.environ, "REALSYS_TRIAL_DIR": str(link)}
    worker = subprocess.Popen(["sleep", "600"], env=environment)
    at_the_request: list[int | None] = []

    def tell(text: str) -> None:
        if text.startswith("requested a stop after the current step by SIGTERM"):
            at_the_request.append(worker.poll())

    try:
        report = stop(files, grace_s=100.0, on_action=tell, term_s=60.0)
        assert worker.wait(60) == -signal.SIGTERM  # what is left afterwards is ended, as ever
    finally:
        worker.kill()
    assert report.view.state is State.STOPPED
    assert at_the_request == [None]
    golden.check(report.actions[:2])


# ---- two resumes ----------------------------------------------------------------------------------


@pytest.fixture
def resumed_twice(bin_folder: Path, trial: TrialFiles) -> TrialFiles:
    """Job 8 has attempt 2; the note is that of job 9, which was submitted at the same moment."""
    write_record(trial.attempt(1).record, attempt())
    write_record(trial.attempt(1).exit, marker(Result.FAILED))
    write_record(trial.attempt(2).record, attempt(2, "8"))
    write_record(trial.submission, submission("9", after=1))
    return trial


def states_in_slurm(folder: Path, **states: str) -> None:
    rows = "".join(queue_row(name.removeprefix("job"), state) for name, state in states.items())
    (folder / "queue").write_text(rows)
    program(folder, "squeue", f'cat "{folder}/queue"')


@pytest.mark.parametrize(
    ("job8", "job9", "exit2", "means"),
    [
        ("RUNNING", "FAILED", None, State.STARTING),  # was told as lost
        ("RUNNING", "PENDING", None, State.STARTING),  # was told as queued
        ("FAILED", "FAILED", None, State.LOST),
        ("FAILED", "FAILED", Result.FAILED, State.FAILED),
        ("FAILED", "PENDING", Result.FAILED, State.QUEUED),
        ("COMPLETED", "FAILED", Result.COMPLETED, State.COMPLETED),
    ],
)
def test_the_job_that_has_the_attempt_counts(
    bin_folder: Path,
    resumed_twice: TrialFiles,
    job8: str,
    job9: str,
    exit2: Result | None,
    means: State,
) -> None:
    states_in_slurm(bin_folder, job8=job8, job9=job9)
    if exit2 is not None:
        write_record(resumed_twice.attempt(2).exit, marker(exit2, 2))
    with closing(StatusReader(resumed_twice)) as reader:
        assert reader.view().state is means


def test_a_stop_ends_the_job_that_has_the_attempt(
    bin_folder: Path,
    resumed_twice: TrialFiles,
    no_store: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_module, "POLL_PAUSES_S", (0.01,))
    monkeypatch.setattr(stop_module, "QUIET_S", 0.05)
    monkeypatch.setattr(stop_module, "EXTRA_S", 0.05)
    states_in_slurm(bin_folder, job8="RUNNING", job9="FAILED")
    over = "".join(queue_row(job, "CANCELLED") for job in "89")
    (bin_folder / "over").write_text(over)
    kills = f'cp "{bin_folder}/over" "{bin_folder}/queue"'
    program(bin_folder, "scancel", f'if [ "$1" = --full ]; then {kills}; fi')
    report = stop(resumed_twice, grace_s=0.1, extra_s=0.05)
    assert calls(bin_folder, "scancel") == [
        "--batch --signal=TERM 8",
        "--full --signal=KILL 8",
        "8",
    ]
    golden.check(report.actions[-1])
