"""The command line as a user and a script meet it: help, Tab, errors, exit statuses, JSON."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.cli import completion, entry, front_page, write_front_page
from launcher.cli.command_line import run
from launcher.cli.tables import print_status
from launcher.sites.places import user_name
from launcher.submit import setting_table
from launcher.submit.planning import make_plan
from launcher.terminal.exit_codes import ExitCode
from launcher.trials import render
from launcher.trials.merged_logs import LogLine
from launcher.trials.trial_view import Records, TrialView, view_of
from realsys.api import errors, registry
from realsys.api.plan import plan_text
from realsys.config.option_tree import range_text
from realsys.trial.liveness import Liveness
from realsys.trial.records import (
    AttemptRecord,
    ExitMarker,
    Failure,
    Progress,
    Result,
    TrialFiles,
    TrialRecord,
    write_record,
)
from realsys.trial.trial_state import State

pytestmark = pytest.mark.usefixtures("file_root")


@pytest.fixture
def trial(file_root: Path) -> TrialFiles:
    """A planned trial ppo-math/run7 with one log."""
    plan = make_plan("ppo-math", ["seed=5"], trial="run7")
    files = TrialFiles(Path(plan.trial_dir))
    files.root.mkdir(parents=True)
    files.plan.write_text(plan_text(plan))
    record = TrialRecord(
        experiment_name="ppo-math",
        trial_name="run7",
        user=user_name(),
        cluster="local",
        plan_hash="",
        created_at=1.0,
        launch_host="h",
    )
    write_record(files.record, record)
    log = files.attempt(1).log("model_worker/0")
    log.parent.mkdir(parents=True)
    log.write_text("hello\nworld\n")
    return files


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON document on stdout."""
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1
    return content  # type: ignore[no-any-return]


# ---- the quick front ------------------------------------------------------------------------


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in entry.without_colour(text).splitlines()]


def test_the_help_page_is_what_typer_draws() -> None:
    assert plain(front_page.HELP) == plain(write_front_page.rendered_help())


def test_the_words_of_tab_are_those_of_the_command_line() -> None:
    namespace: dict[str, Any] = {}
    exec(write_front_page.text(), namespace)
    assert namespace["VERBS"] == front_page.VERBS
    assert tuple(sorted(registry.BUILTIN["experiment"])) == front_page.EXPERIMENTS


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_front_prints_the_help_page(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(words) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for verb in front_page.VERBS:
        assert f" {verb} " in out


def test_colours_only_where_they_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    entry.main(["-h"])
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    entry.main(["-h"])
    assert "\x1b" not in capsys.readouterr().out


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running ``code``."""
    probe = f"{code}\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize(
    "words",
    [[], ["--help"], ["__complete", "la"], ["__complete", "logs", ""], ["completion", "bash"]],
)
def test_the_front_imports_neither_typer_nor_our_packages(words: list[str]) -> None:
    code = f"from launcher.cli.entry import main\nmain({words!r})"
    assert not loaded_by(code) & {"typer", "rich", "realsys", "yaml", "dataclasses", "json"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "module",
    [f"launcher.cli.{p.stem}" for p in sorted(Path(entry.__file__).parent.glob("[a-z]*.py"))],
)
def test_no_module_of_the_launcher_loads_torch(module: str) -> None:
    heavy = {"torch", "transformers", "etcd3", "matplotlib", "wandb", "pandas"}
    assert not loaded_by(f"import {module}") & heavy


def test_planning_the_default_experiment_loads_no_torch() -> None:
    code = "from launcher.cli.command_line import run\nassert run(['plan', 'ppo-math']) == 0"
    assert not loaded_by(code) & {"torch", "transformers", "matplotlib", "submitit", "zmq"}


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.entry", "--version"], capture_output=True, text=True
    )
    assert re.fullmatch(r"realsys \d+\.\d+.*\n", done.stdout)


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m launcher.cli.entry show --config ppo-math | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stderr, len(done.stdout.splitlines())) == ("", 1)


# ---- completion -----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["launch"]),
        (["st"], ["status", "stop"]),
        (["--v"], ["--version"]),
        (["launch", "sft"], ["sft-math"]),
        (["launch", "--det"], ["--detach"]),
        (["status", "ppo"], ["ppo-math/run7"]),
        (["logs", "ppo-math/run7", ""], ["model_worker/0"]),
        (
            ["show", "--config", "p"],
            ["ppo-math", "ppo-math-async", "ppo-math-detached", "ppo-math-split"],
        ),
        (["plan", "--cluster", ""], ["local"]),
        (["launch", "ppo-math", "see"], ["seed="]),
        (["plan", "ppo-math", "actor.op"], ["actor.optimizer."]),
        (["plan", "sft-math", "see"], []),  # not planned yet: not known
        (
            ["launch", "--import", "x.py", "ppo-math", "placement=s"],
            ["placement=shared", "placement=split"],
        ),
        (["launch", "ppo-math", "placement", "="], ["shared", "split"]),  # as bash cuts words
        (["launch", "ppo-math", "placement", "=", "sp"], ["split"]),
        (["launch", "ppo-math", "seed", "=", "3", "tensorboard=t"], ["tensorboard=true"]),
        (["resume", "ppo-math/run7", "task.shuffle=f"], ["task.shuffle=false"]),
        (["show", "--config", "ppo-math", "actor.dtype=n"], ["actor.dtype=none"]),
        (["launch", "ppo-math", "scheduling.all.part"], ["scheduling.all.partition="]),
        (["launch", "ppo-math", "actor.path="], []),
        (["launch", "--config", ""], []),
        (["nonsense", "x"], []),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_tab(trial: TrialFiles, words: list[str], expected: list[str]) -> None:
    assert completion.candidates(words) == expected


def test_tab_in_a_real_bash(trial: TrialFiles, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "realsys"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m launcher.cli.entry "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(realsys completion bash)"; COMP_WORDS=(realsys logs ppo-math/run7 mo); '
        'COMP_CWORD=3; _realsys; printf "%s|" "${COMPREPLY[@]}"'
    )
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.stdout == "model_worker/0|"
    script = script.replace("logs ppo-math/run7 mo", "plan ppo-math placement = sp")
    script = script.replace("COMP_CWORD=3", "COMP_CWORD=5")
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert (done.stdout, done.stderr) == ("split|", "")


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["lauch"], 2, "Did you mean 'launch'"),
        (["launch"], 2, "Missing argument 'EXPERIMENT'"),
        (["launch", "ppo-math", "--detch"], 2, "--detach"),
        (["launch", "ppo-mth"], 4, "did you mean 'ppo-math'"),
        (["plan", "ppo-math", "lr=1"], 4, "did you mean 'actor.optimizer.lr'"),
        (["plan", "ppo-math", "--trial", "a/b"], 4, "can't be used in paths and keys"),
        (["plan", "ppo-math", "--trial", ""], 4, "trial name '' can't be used in paths and keys"),
        (["launch", "ppo-math", "--trial=-x"], 4, "trial name '-x' can't be used"),
        (["launch", "ppo-math", "--sweep", "seed=1,2", "--trial", ""], 4, "can't be used in paths"),
        (["plan", "ppo-math", "--config", "no.yaml"], 4, "can't be read"),
        (["plan", "ppo-math", "--cluster", "lcal"], 4, "did you mean 'local'?"),
        (["plan", "ppo-math", "--import", "no.py"], 4, "no file"),
        (["plan", "ppo-math", "task.path=/no"], 4, "/no"),
        (["status", "ppo-math/run1"], 3, "no trial 'ppo-math/run1'"),
        (["stop", "nope"], 3, "no trial of experiment 'nope'"),
        (["resume", "nope"], 3, "launch one: realsys launch EXPERIMENT"),
        (["graph", "ppo-mat"], 4, "did you mean 'ppo-math'"),
        (["show"], 2, "either a TRIAL or --config"),
        (["completion", "tcsh"], 2, "use one of bash, zsh, fish"),
    ],
)
def test_an_error_is_three_lines_and_a_status(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "  where: " in captured.err
    assert "  fix:   " in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_unwritable_root_is_told_before_anything(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_root.write_text("a file")
    assert run(["plan", "ppo-math"]) == ExitCode.CLUSTER_REFUSED
    golden.check(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "status", "kind"),
    [
        (["status", "x/y", "--json"], 3, "NoSuchTrial"),
        (["plan", "ppo-math", "--json", "lr=1", "seed=x"], 4, "ConfigErrors"),
        (["plan", "--json"], 2, "RealsysError"),
    ],
)
def test_errors_are_json_documents_too(
    words: list[str], status: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == status
    error = document(capsys)["error"]
    assert error["kind"] == kind
    assert set(error) >= {"what", "where", "fix"}
    if kind == "ConfigErrors":
        golden.check([p["what"] for p in error["problems"]])


def test_a_bug_says_so_and_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def boom(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("launcher.submit.planning.make_plan", boom)
    assert run(["plan", "ppo-math", "--json"]) == ExitCode.BUG
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    error = json.loads(captured.out)["error"]
    golden.check(error["what"])
    assert "test_cli.py" in error["where"]


def test_every_errors_exit_status_is_one_of_the_command_lines() -> None:
    classes = [errors.RealsysError]
    for cls in classes:
        classes += cls.__subclasses__()
        assert cls.exit_code in set(ExitCode), cls


# ---- verbs ----------------------------------------------------------------------------------


def test_plan_as_json_is_the_plan_and_writes_nothing(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "ppo-math", "actor.optimizer.lr=1e-3", "--json"]) == 0
    content = document(capsys)
    assert content["plan"]["trial_name"] == "run1"
    assert content["plan"]["options"]["actor"]["optimizer"]["lr"] == 1e-3
    assert len(content["hash"]) == 64
    assert not file_root.exists()


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "ppo-math"]) == 0
    out = capsys.readouterr().out
    for text in ("phase 1 of 2: sft", "phase 2 of 2: main", "1 × model_worker", "actor_gen"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 100 + len(os.environ["REALSYS_FILE_ROOT"])


def test_the_default_trial_name_is_the_next_free_one(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "ppo-math", "--json"]) == 0
    assert document(capsys)["plan"]["trial_name"] == "run8"


def test_own_experiments_by_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "my_experiment_for_test_cli.py"
    mine.write_text(
        "from dataclasses import dataclass\n"
        "from experiments.sft import SFTExperiment\n"
        "from realsys.api.registry import register_experiment\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(SFTExperiment):\n"
        '    """My own."""\n'
        "register_experiment('mine-for-test-cli', Mine)\n"
    )
    assert run(["plan", "mine-for-test-cli", "--import", str(mine), "--json"]) == 0
    assert document(capsys)["plan"]["imports"] == [str(mine)]
    assert run(["experiments", "--json"]) == 0
    found = {e["name"]: e["doc"] for e in document(capsys)["experiments"]}
    assert found["mine-for-test-cli"] == "My own."


@pytest.mark.parametrize("name", ["ppo-math/run7", "ppo-math", "FOLDER"])
def test_status_by_name_by_experiment_and_by_folder(
    trial: TrialFiles, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(trial.root) if name == "FOLDER" else name
    assert run(["status", name, "--json"]) == 0
    view = document(capsys)["trial"]
    assert (view["trial"], view["state"]) == ("ppo-math/run7", "planned")
    assert run(["status", name]) == 0
    assert "ppo-math/run7  planned" in capsys.readouterr().out


def test_a_misspelt_trial_gets_the_nearest(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "ppo-math/rnu7"]) == 3
    golden.check(capsys.readouterr().err)


@pytest.mark.parametrize("words", [["ls"], ["status"]])
def test_lists(trial: TrialFiles, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    assert "ppo-math/run7" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    assert [t["trial"] for t in document(capsys)["trials"]] == ["ppo-math/run7"]


def test_show_the_options_of_a_trial(trial: TrialFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "ppo-math/run7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed=5" in lines
    assert "actor.optimizer.lr=0.0003" in lines
    assert run(["plan", "ppo-math", *lines]) == 0  # what it prints can be given back


def test_show_every_option_with_default_unit_range_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["show", "--config", "ppo-math", "--json"]) == 0
    rows = {row["path"]: row for row in document(capsys)["options"]}
    assert rows["task.max_prompt_len"] == {
        "path": "task.max_prompt_len",
        "type": "whole number",
        "default": 128,
        "unit": "tokens",
        "range": "≥ 1",
        "meaning": "longest question; see long_prompts",
        "section": False,
    }
    assert rows["gen.temperature"]["type"] == "number"
    assert run(["show", "--config", "ppo-math", "seed=7", "--json"]) == 0
    assert {r["path"]: r for r in document(capsys)["options"]}["seed"]["default"] == 7
    assert run(["show", "--config", "ppo-math", "sede=7"]) == 4
    assert run(["show", "ppo-math/run7", "seed=7"]) == 2
    capsys.readouterr()
    assert run(["show", "--config", "ppo-math"]) == 0
    out = capsys.readouterr().out
    assert (
        "# task = math (file | harbor | math | mixture | preferences | reasoning_gym | verifiers): "
        in out
    )  # a choice heads its kind's settings
    for path in rows:
        group = re.escape(path.rpartition(".")[0])
        shown = rf"^(# )?{re.escape(path)} |^# {group}: .* \(as [a-z.]+\.\*\)$"
        assert re.search(shown, out, re.MULTILINE), path


def test_graph_of_an_experiment_and_of_a_trial(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["graph", "ppo-math", "--json"]) == 0
    levels = document(capsys)["levels"]
    assert levels[0] == ["actor_gen"]
    assert run(["graph", "ppo-math/run7"]) == 0
    assert "actor_gen" in capsys.readouterr().out


def test_logs(trial: TrialFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "ppo-math", "--grep", "wor"]) == 0
    assert capsys.readouterr().out == "model_worker/0 | world\n"
    assert run(["logs", "ppo-math", "model_worker", "--json"]) == 0
    assert document(capsys)["lines"][0] == {
        "attempt": 1,
        "worker": "model_worker/0",
        "text": "hello",
    }


def test_stop_of_a_trial_that_does_not_run_is_fine(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stop", "ppo-math/run7"]) == 0
    assert "nothing runs" in capsys.readouterr().err


def test_wait_gives_up_with_its_own_status(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialView, "is_over", False)
    assert run(["wait", "ppo-math/run7", "--timeout", "0", "--json"]) == ExitCode.TIMED_OUT
    assert document(capsys)["error"]["what"].startswith("ppo-math/run7 is still")


# ---- what a run says while it goes on, and when it is over ----------------------------------


def view(**changes: Any) -> TrialView:
    """A trial that runs its main phase."""
    return TrialView(
        **{"trial": "e/t", "state": State.RUNNING, "folder": "/f", "phase": "main", **changes}
    )


def progress(step: int, **changes: Any) -> Progress:
    """Step ``step`` of 100, an MFC running."""
    running = {"actor_gen": "model_worker/0"}
    return Progress(
        **{
            "attempt": 1,
            "phase": "main",
            "step": step,
            "total_steps": 100,
            "running": running,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("change", "age_s", "told"),
    [
        ({}, 14.9, False),
        ({}, 15.0, True),  # nothing new, and long silence
        ({"step": 2}, 1.9, False),
        ({"step": 2}, 2.0, True),
        ({"progress": progress(1, doing="evaluating")}, 2.0, True),
        ({"phase": "sft"}, 0.0, True),
        ({"attempt": 2}, 0.0, True),
        ({"state": State.COMPLETED}, 0.0, True),
    ],
)
def test_a_pipe_is_told_of_stages_at_once_and_of_steps_every_two_seconds(
    change: dict[str, Any], age_s: float, told: bool
) -> None:
    shown = view(step=1, progress=progress(1))
    now = replace(shown, **change)
    assert render.is_line_due(now, shown, age_s=age_s) is told


def test_a_line_says_what_is_done_between_steps() -> None:
    line = render.progress_line(view(progress=progress(7, doing="evaluating")))
    assert line == "e/t | running | step 7/100 | evaluating"


def failed_trial(files: TrialFiles, failure: Failure | None) -> None:
    """Records of a first attempt that is over; without a failure its supervisor was killed."""
    attempt = AttemptRecord(
        number=1,
        token="t",
        host=socket.gethostname(),
        supervisor_pid=1,
        supervisor_start=0,
        started_at=1.0,
    )
    write_record(files.attempt(1).record, attempt)
    if failure is not None:
        marker = ExitMarker(
            result=Result.FAILED,
            attempt=1,
            ended_at=61.0,
            phase="main",
            step=7,
            first_failure=failure,
            resume="realsys resume ppo-math/run7",
        )
        write_record(files.attempt(1).exit, marker)


def test_status_of_a_failed_trial_shows_reason_log_and_how_to_go_on(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    master = trial.attempt(1).log("master_worker/0")
    steps = [f"2026-11-21T20:57:0{i}.000 INFO master_worker/0 step done" for i in range(9)]
    master.write_text("\n".join([*steps, "Traceback (most recent call last):", "  File", ""]))
    failed_trial(
        trial,
        Failure(
            worker="model_worker/0",
            host="n1",
            pid=5,
            why="out of memory",
            at=60.0,
            fix="smaller batches",
            log="/the/log",
            log_tail=("line 1", "line 2"),
        ),
    )
    assert run(["status", "ppo-math/run7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:14] == [
        "ppo-math/run7  failed  attempt 1",
        "  why       model_worker/0 (pid 5 on n1): out of memory",
        "  fix       smaller batches",
        "  resume    realsys resume ppo-math/run7",
        "  log       /the/log",
        "    line 1",
        "    line 2",
        f"  master    {master}",
        *(f"    {line}" for line in steps[4:]),
        lines[13],
    ]
    assert lines[13].startswith("  where     ")


def test_status_of_a_lost_trial_shows_the_errors_in_its_logs(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    failed_trial(trial, None)
    log = trial.attempt(1).log("model_worker/0")
    log.write_text(
        "2026-01-01T00:00:00 INFO model_worker/0 step=1 x  fine\n"
        "2026-01-01T00:00:01 ERROR model_worker/0 step=1 x  failed error=no room\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in x\n'
        "realsys.api.errors.ClusterError: no room\n"
        "  where: /disk/file\n"
        "  fix:   free space\n"
    )
    assert run(["status", "ppo-math/run7"]) == 0
    out = capsys.readouterr().out
    assert "  fix       realsys resume ppo-math/run7" in out
    shown = [line.strip() for line in out.splitlines() if line.startswith("    ")]
    assert shown == [
        "2026-01-01T00:00:01 ERROR model_worker/0 step=1 x  failed error=no room",
        "realsys.api.errors.ClusterError: no room",
        "where: /disk/file",
        "fix:   free space",
    ]


def test_a_trial_that_is_over_computes_nothing(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Records(
        trial="e/t",
        folder="/f",
        now=100.0,
        attempt=AttemptRecord(
            number=1, token="t", host="h", supervisor_pid=1, supervisor_start=1, started_at=1.0
        ),
        supervisor=Liveness.ALIVE,
        progress=progress(7, doing="saving"),
    )
    print_status(replace(view_of(records), trusted_rules=("mine",)))
    shown = capsys.readouterr().out
    assert "  computes  actor_gen on model_worker/0" in shown
    assert "rule mine" in next(line for line in shown.splitlines() if "trusted" in line)
    marker = ExitMarker(result=Result.COMPLETED, attempt=1, ended_at=9.0, phase="main", step=7)
    print_status(view_of(replace(records, exit=marker)))
    out = capsys.readouterr().out
    assert "step 7/100" in out
    assert "computes" not in out


def test_a_full_disk_is_noted(
    trial: TrialFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize, f_files, f_favail = 3, 4096, 0, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert run(["status", "ppo-math/run7"]) == 0
    golden.check(capsys.readouterr().err)


def test_bounds_of_an_option_are_shown_open_and_closed() -> None:
    golden.check(range_text({"gt": 0, "lt": 1}))
    assert range_text({"ge": 0, "lt": 1}) == "≥ 0 and < 1"
    assert range_text({"ge": 0, "le": 1}) == "0 … 1"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("run7", "did you mean 'ppo-math/run7'?"),
        ("rn7", "did you mean 'ppo-math/run7'?"),
        ("PPO-MATH/Run7", "did you mean 'ppo-math/run7'?"),
        ("./nothing", "name a folder that holds a plan.json"),
        ("zzz", "all of them: realsys ls"),
    ],
)
def test_a_trial_s_name_alone_in_capitals_or_as_a_folder_gets_an_answer(
    trial: TrialFiles, wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", wrong]) == 3
    assert f"fix:   {meant}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--lr=1"], "settings have no dashes: write actor.optimizer.lr=VALUE or "),
        (
            ["--critic.optimizer.lr", "1"],
            "settings have no dashes: write critic.optimizer.lr=VALUE; or",
        ),
        (["--trail", "x"], "see realsys plan --help"),
    ],
)
def test_a_setting_written_as_an_option_is_told_how_to_write_it(
    words: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "ppo-math", *words]) == 2
    assert f"fix:   {fix}" in capsys.readouterr().err


EVIL = "\x1b]0;owned\x07\x9b2J\u202e\udcff"
SEEN = r"\x1b]0;owned\x07\x9b2J\u202e\udcff"


def test_nothing_from_outside_acts_on_the_terminal(
    trial: TrialFiles, file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = trial.attempt(1).log("model_worker/0")
    log.write_bytes(b"\x1b[31mred\x1b[0m \x1b]0;owned\x07\xc2\x9b2J\n")
    assert run(["logs", "ppo-math/run7"]) == 0
    assert capsys.readouterr().out.endswith("red \\x1b]0;owned\\x07\\x9b2J\n")
    folder = file_root / "runs" / user_name() / "ppo-math" / EVIL
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    assert run(["ls"]) == 0
    assert SEEN in capsys.readouterr().out
    assert run(["plan", "ppo-math", EVIL]) == 4
    assert SEEN in capsys.readouterr().err
    assert run(["status", f"ppo-math/{EVIL}", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["trial"]["trial"] == f"ppo-math/{EVIL}"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert entry.main(["__complete", "status", ""]) == 0
    assert "owned" not in capsys.readouterr().out


def test_the_live_view_shows_text_from_outside_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    shown = view(trial=f"e/{EVIL}", notes=(EVIL,), reason=EVIL)
    console = Console(width=200, force_terminal=False, record=True)
    console.print(render.picture(shown, [f"worker | {EVIL}"]))
    assert capsys.readouterr().out.count(SEEN) == 4


def test_the_live_view_keeps_its_figures_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    busy = view(
        state=State.RUNNING,
        progress=progress(350, tokens_per_second=123_456.0, step_seconds=12.3, eta_seconds=7500.0),
    )
    Console(width=80, force_terminal=False).print(render.picture(busy, []))
    out = capsys.readouterr().out.splitlines()
    golden.check([line.rstrip() for line in out])
    assert any(line.rstrip().endswith("step 350/100") for line in out)


def test_the_live_view_forgets_the_errors_of_an_earlier_attempt() -> None:
    lines = [LogLine(1, "a", "ERROR old"), LogLine(2, "a", "ERROR new")]
    assert render.current_warnings(lines, attempt=1, after=0) == ["a | ERROR old", "a | ERROR new"]
    assert render.current_warnings(lines, attempt=2, after=0) == ["a | ERROR new"]
    assert render.current_warnings(lines[:1], attempt=1, after=1) == []  # resumed, not begun


@pytest.mark.parametrize(("term", "draws"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_can_not_draw_gets_lines(
    term: str, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(render, "_screen", lambda *_: "screen")
    monkeypatch.setattr(render, "_lines", lambda *_: "lines")
    monkeypatch.setattr(render, "StatusReader", lambda files: io.StringIO())
    files: Any = None
    assert render.follow(files, Terminal()) == ("screen" if draws else "lines")  # type: ignore[comparison-overlap]


def test_an_interrupt_while_modules_load_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "launcher.cli.command_line":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "launcher.cli.command_line")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert entry.main(["experiments"]) == ExitCode.INTERRUPTED == entry.INTERRUPTED


def test_an_import_that_leaves_is_one_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("raise SystemExit(3)\n")
    assert run(["experiments", "--import", str(path)]) == 4
    told = capsys.readouterr().err
    golden.check(told)


def test_a_picture_of_an_unknown_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["graph", "ppo-math", "--out", str(tmp_path / "x.txt")]) == ExitCode.USAGE
    golden.check(capsys.readouterr().err)


def test_settings_of_other_code_are_not_offered(trial: TrialFiles, tmp_path: Path) -> None:
    """The table counts while the files that declare the settings are as they were."""
    (table,) = (tmp_path / "home" / ".cache" / "realsys" / "settings").iterdir()
    assert setting_table.recall("ppo-math")["placement"] == ("shared", "split")
    assert setting_table.recall("sft-math") == {}
    text = table.read_text()
    for wrong in (
        re.sub(r"(compose.py\t)", r"\g<1>9", text),
        text.replace("compose.py", "gone.py"),
        text.replace(setting_table.FORMAT, "other"),
        "",
        "\n\n",
    ):
        table.write_text(wrong)
        assert setting_table.recall("ppo-math") == {}
        assert completion.candidates(["plan", "ppo-math", "see"]) == []
    table.write_bytes(b"\xff\xfe")
    assert completion.candidates(["plan", "ppo-math", "see"]) == []
    assert run(["plan", "ppo-math"]) == 0
    assert completion.candidates(["plan", "ppo-math", "see"]) == ["seed="]
    shutil.rmtree(table.parent)
    table.parent.write_text("no folder")
    assert run(["plan", "ppo-math"]) == 0
    assert completion.candidates(["plan", "ppo-math", "see"]) == []
