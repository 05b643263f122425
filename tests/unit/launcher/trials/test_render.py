"""The lines of a run in a pipe, its picture and its summary, as people read them (compared whole)."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
from rich.console import Console

from launcher.slurm.query.time_left import TimeLeft
from launcher.trials import render
from launcher.trials.merged_logs import LogLine
from launcher.trials.trial_view import TrialView, WorkerView
from realsys.trial.records import ExitMarker, Failure, Progress, Result, TrialFiles
from realsys.trial.trial_state import State

NOW = 100_000.0
WORKERS = tuple(
    WorkerView(worker=f"model_worker/{i}", state="starting", restarts=i % 2 * (i < 2))
    for i in range(9)
)
PROGRESS = Progress(
    attempt=2,
    phase="main",
    step=7,
    total_steps=9,
    step_seconds=2.5,
    eta_seconds=75.0,
    tokens_per_second=1234.5,
    running={"actor_gen": "model_worker/0"},
    headline={"reward": 0.25, "KL": 0.5},
    doing="saving",
    updated_at=NOW,
)
BARE = replace(PROGRESS, step=0, total_steps=0, running={}, headline={}, doing="")
VIEW = TrialView(
    trial="exp/run1\x1b",
    state=State.RUNNING,
    folder="/x",
    attempt=2,
    started_at=NOW - 30,
    phase="main",
    phases=("sft", "main"),
    step=7,
    progress=PROGRESS,
    workers=WORKERS[:2],
    time=TimeLeft(limit_s=600, left_s=60.0, over_s=15.0),
)
VIEWS = {
    "whole": VIEW,
    "no limit": replace(VIEW, time=None, attempt=1, phases=("main",)),
    "over": replace(VIEW, state=State.STOPPED, ended_at=NOW, reason="stopped", workers=()),
    "in time, no step yet": replace(
        VIEW, progress=BARE, workers=(), time=TimeLeft(limit_s=600, left_s=60.0)
    ),
    "no rates": replace(
        VIEW,
        progress=replace(BARE, step=1, step_seconds=0, tokens_per_second=0, eta_seconds=None),
        workers=(),
    ),
    "starting": replace(
        VIEW, state=State.STARTING, progress=None, workers=WORKERS, notes=("a note",)
    ),
    "queued": replace(VIEW, state=State.QUEUED, progress=None, reason="Priority", started_at=None),
    "failed": replace(VIEW, state=State.FAILED, progress=None, reason="killed", workers=(), time=None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    still = SimpleNamespace(time=lambda: NOW, monotonic=lambda: NOW)
    monkeypatch.setattr(render, "time", still)


@pytest.mark.parametrize("what", VIEWS)
def test_a_run_in_one_line_and_as_a_picture(what: str) -> None:
    told = io.StringIO(f"{render.progress_line(VIEWS[what])}\n")
    told.seek(0, 2)
    screen = Console(file=told, width=120, color_system=None)
    screen.print(render.picture(VIEWS[what], ["a warning"]))
    golden.check(told.getvalue())


@pytest.mark.parametrize(
    ("change", "age_s", "due"),
    [
        ({}, 14.9, False),
        ({}, 15.0, True),
        ({"step": 8}, 1.9, False),
        ({"step": 8}, 2.0, True),
        ({"progress": replace(PROGRESS, doing="")}, 2.0, True),
        ({"progress": None}, 2.0, True),
        ({"progress": None}, 1.9, False),
        ({"state": State.STOPPING}, 0.0, True),
        ({"attempt": 3}, 0.0, True),
        ({"phase": "sft"}, 0.0, True),
    ],
)
def test_a_pipe_gets_a_line_when_something_has_moved(change, age_s: float, due: bool) -> None:
    assert render.is_line_due(replace(VIEW, **change), VIEW, age_s=age_s) is due
    assert render.rates(replace(VIEW, progress=None)) == ""


def test_warnings_are_of_the_attempt_that_is_shown() -> None:
    lines = [LogLine(n, "w/0", f"of {n}") for n in (1, 2, 3)]
    shown = {
        (attempt, after): render.current_warnings(lines, attempt, after)
        for attempt, after in ((2, 0), (2, 1), (2, 2), (0, 0))
    }
    assert shown == {
        (2, 0): ["w/0 | of 2", "w/0 | of 3"],
        (2, 1): ["w/0 | of 2", "w/0 | of 3"],
        (2, 2): ["w/0 | of 3"],
        (0, 0): ["w/0 | of 1", "w/0 | of 2", "w/0 | of 3"],
    }


@pytest.mark.parametrize("state", State)
def test_what_a_shell_is_told_at_the_end(state: State) -> None:
    code = render.exit_code(replace(VIEW, state=state))
    assert code == {State.COMPLETED: 0, State.STOPPED: render.ExitCode.RUN_STOPPED}.get(
        state, render.ExitCode.RUN_FAILED
    )


FAILURE = Failure(
    worker="model_worker/0",
    host="n1",
    pid=4,
    why="killed",
    at=1.0,
    log="/l",
    log_tail=("Traceback", "2026-11-21T09:20:06 of both"),
)
END = ExitMarker(
    result=Result.FAILED, attempt=2, ended_at=NOW, phase="main", resume="realsys resume exp/run1 -x"
)
ENDED = replace(
    VIEW,
    trial="exp/run1",
    state=State.FAILED,
    ended_at=NOW,
    reason="killed\nby the kernel",
    fix="more memory\nor less",
    notes=("a note",),
    exit=replace(END, first_failure=FAILURE),
)
MASTERS = [f"2026-11-21T09:20:0{i} line {i}" for i in range(6)]
MASTERS[3:3] = ["  of a traceback", "2026-11-21T09:20:06 of both"]
ENDS = {
    "failed": ENDED,
    "completed": replace(ENDED, state=State.COMPLETED, reason="", fix="", notes=(), exit=None),
    "the fix says it": replace(ENDED, fix="do; realsys resume exp/run1 -x", attempt=0),
    "not resumable": replace(ENDED, is_resumable=False, exit=END, progress=None, started_at=None),
    "of the master": replace(
        ENDED, exit=replace(END, first_failure=replace(FAILURE, worker=render.MASTER, log=""))
    ),
    "requeued": replace(ENDED, state=State.QUEUED),
    "lost": replace(ENDED, state=State.LOST, exit=None),
    "lost before it began": replace(ENDED, state=State.LOST, exit=None, attempt=0),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_a_summary(what: str, tmp_path: Path) -> None:
    files = TrialFiles(tmp_path / "run1")
    logs = files.attempt(2).logs
    logs.mkdir(parents=True)
    files.attempt(2).log(render.MASTER).write_text("\n".join(MASTERS))
    errors = [f"2026-11-21T09:20:05 ERROR {i}" for i in range(5)]
    errors += ["fine", "torch.OutOfMemoryError: CUDA", "  fix:   less", " Errors: none"]
    (logs / "model_worker-0.log").write_text("\n".join(errors))
    (logs / "model_worker-1.log").write_text("fine\n")
    files.submitit.mkdir()
    (files.submitit / "6_0_log.err").touch()
    os.utime(files.submitit / "6_0_log.err", (1, 1))
    (files.submitit / "7_0_log.err").write_text("\n".join(f"printed {i}" for i in range(17)))
    (files.root / "checkpoints" / "actor" / "step-7").mkdir(parents=True)
    (files.root / "checkpoints" / "actor" / "latest").symlink_to("step-7")
    files.report.touch()
    view = replace(ENDS[what], folder=str(files.root))
    details = render.failure_details(view)
    if what == "lost before it began":
        assert details == [f"    printed {i}" for i in range(2, 17)]
    elif what in ("completed", "not resumable", "requeued"):
        assert details == []
    else:
        golden.check(details)
    if what in ("failed", "not resumable"):
        summary = render.summary(view, files)
        golden.check([line for line in summary if line not in details])
        assert [line for line in summary if line in details] == details
        shutil.rmtree(logs)
        shutil.rmtree(files.submitit)
        assert render.failure_details(view) == [
            line for line in details[:4] if line[2:8] != "master"
        ]
        assert render.failure_details(replace(view, state=State.LOST, exit=None, attempt=0)) == []
