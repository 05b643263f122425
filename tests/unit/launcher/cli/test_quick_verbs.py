"""Command lines that are run without typer mean what typer would understand."""

from __future__ import annotations

import subprocess
import sys
from subprocess import PIPE
from typing import Any

import pytest

from launcher.cli.command_line import run
from launcher.cli.verbs import quick_verbs
from launcher.cli.verbs.quick_verbs import quick_verb
from launcher.terminal.exit_codes import ExitCode

NO_STATUS = {"trial": None, "report": False, "json": False, "cluster": None}
NO_LS = {"json": False, "cluster": None}
PLAIN: dict[str, dict[str, Any]] = {
    "status": NO_STATUS,
    "status a/b": {**NO_STATUS, "trial": "a/b"},
    "status --json a/b": {**NO_STATUS, "trial": "a/b", "json": True},
    "status a/b --report --cluster x --json": {
        "trial": "a/b",
        "report": True,
        "json": True,
        "cluster": "x",
    },
    "ls": NO_LS,
    "ls --cluster ./x.yaml --json": {"json": True, "cluster": "./x.yaml"},
    "plan a": {"words": ("a",), "trial": None, **NO_LS},
    "plan --cluster x a b=1 --json c.d=[-2] --trial t": {
        "words": ("a", "b=1", "c.d=[-2]"),
        "trial": "t",
        "json": True,
        "cluster": "x",
    },
}
LEFT_TO_TYPER = (
    *(
        "status --help",
        "ls -h",
        "status a b",
        "ls a",
        "status --cluster",
        "ls --report",
    ),
    *("status --cluster=x", "status -- a", "status --jso", "ls --cluster --json", "status -x"),
    *(
        "status --cluster x --cluster y",
        "ls --json --json",
        "plan",
        "plan --json",
        "plan a --report",
    ),
    *("plan a --search", "plan a -p gpu", "plan a --trial", "plan a -- b=1", "plan a --config f"),
)


@pytest.mark.parametrize("line", PLAIN)
def test_typer_understands_the_same(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def show_status(trial: str | None = None, **options: Any) -> int:
        asked.append({"trial": trial, **options})
        return 0

    def list_trials(**options: Any) -> int:
        asked.append(options)
        return 0

    def show_plan(*words: str, json: bool, trial: str | None, **options: Any) -> int:
        own = {"words": words, "json": json, "trial": trial, "cluster": options["cluster"]}
        asked.append(own)
        return 0

    monkeypatch.setattr(quick_verbs, "show_plan", show_plan)
    monkeypatch.setattr(quick_verbs, "show_status", show_status)
    monkeypatch.setattr(quick_verbs, "list_trials", list_trials)
    verb = quick_verb(line.split())
    assert verb is not None
    assert verb() == run(line.split()) == 0
    assert asked == [PLAIN[line]] * 2


@pytest.mark.parametrize("line", LEFT_TO_TYPER)
def test_what_needs_interpretation_is_left_to_typer(line: str) -> None:
    assert quick_verb(line.split()) is None
    assert quick_verb([*line.split(), ""]) is None


@pytest.mark.thorough
@pytest.mark.usefixtures("file_root")
@pytest.mark.parametrize("words", [["ls", "--json"], ["experiments"]])
def test_a_reader_that_leaves_is_no_bug(words: list[str]) -> None:
    code = f"import sys; from launcher.cli.entry import main; sys.exit(main({words!r}))"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, stderr=PIPE)
    assert done.stdout is not None
    done.stdout.close()
    _, errors = done.communicate(timeout=120)
    assert (done.returncode, errors) == (ExitCode.RUN_FAILED, b"")
