"""Merging and following the workers' logs."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest

from launcher.cli.command_line import run
from launcher.sites.places import user_name
from launcher.trials.merged_logs import TrialLogs, matches_pattern, prefixes, worker_of
from realsys.api.errors import ConfigError, TrialError
from realsys.trial.records import TrialFiles


def stamped(second: int, text: str) -> str:
    return f"2026-11-21T04:12:{second:02d}.000 INFO {text}"


def write(files: TrialFiles, attempt: int, worker: str, *lines: str) -> Path:
    path = files.attempt(attempt).log(worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    return TrialFiles(tmp_path)


def texts(logs: TrialLogs, *, last: bool = True) -> list[str]:
    return [line.text for line in logs.read(last=last)]


def test_workers_are_merged_by_time_and_tracebacks_stay_together(files: TrialFiles) -> None:
    write(files, 1, "master_worker/0", stamped(1, "a"), stamped(4, "d"))
    write(files, 1, "model_worker/0", stamped(2, "b"), "Traceback", "  why", stamped(5, "e"))
    found = [(line.worker, line.text.split()[-1]) for line in TrialLogs(files).read(last=True)]
    assert found == [
        ("master_worker/0", "a"),
        ("model_worker/0", "b"),
        ("model_worker/0", "Traceback"),
        ("model_worker/0", "why"),
        ("master_worker/0", "d"),
        ("model_worker/0", "e"),
    ]


def test_attempts_follow_one_another(files: TrialFiles) -> None:
    write(files, 2, "supervisor", stamped(1, "clock went back"))
    write(files, 1, "supervisor", stamped(9, "first"))
    assert [line.attempt for line in TrialLogs(files).read()] == [1, 2]
    assert [line.attempt for line in TrialLogs(files, attempt=2).read()] == [2]


@pytest.mark.parametrize(
    ("pattern", "worker", "expected"),
    [
        ("model_worker", "model_worker/3", True),
        ("model_worker/3", "model_worker/3", True),
        ("model_worker/*", "model_worker/12", True),
        ("*/0", "master_worker/0", True),
        ("supervisor", "supervisor", True),
        ("model", "model_worker/3", True),
        ("mod", "model_worker/3", False),
        ("model_worker/1", "model_worker/12", False),
    ],
)
def test_patterns(pattern: str, worker: str, expected: bool) -> None:
    assert matches_pattern(worker, pattern) is expected


def test_a_pattern_that_fits_nobody_is_an_error_with_the_nearest_name(files: TrialFiles) -> None:
    write(files, 1, "model_worker/0", "x")
    with golden.raises(TrialError):
        TrialLogs(files, pattern="modl_worker/0").check()
    with golden.raises(TrialError):
        TrialLogs(files, attempt=4).check()
    TrialLogs(files, pattern="model_worker").check()


def test_grep_and_a_bad_expression(files: TrialFiles) -> None:
    write(files, 1, "supervisor", "one", "two", "three")
    assert texts(TrialLogs(files, grep="^t")) == ["two", "three"]
    with golden.raises(ConfigError):
        TrialLogs(files, grep="(")


def test_only_whole_lines_until_the_end(files: TrialFiles) -> None:
    path = write(files, 1, "supervisor", "whole")
    logs = TrialLogs(files)
    with open(path, "a") as file:
        file.write("half")
    assert texts(logs, last=False) == ["whole"]
    with open(path, "a") as file:
        file.write(" done\nrest")
    assert texts(logs, last=False) == ["half done"]
    assert texts(logs, last=True) == ["rest"]
    assert texts(logs, last=True) == []


def test_a_truncated_file_is_read_from_its_beginning(files: TrialFiles) -> None:
    path = write(files, 1, "supervisor", "a long first line")
    logs = TrialLogs(files)
    assert texts(logs) == ["a long first line"]
    path.write_text("new\n")
    assert texts(logs) == ["new"]


def test_bytes_that_are_no_text_and_long_lines(files: TrialFiles) -> None:
    path = write(files, 1, "supervisor")
    path.write_bytes(b"\xff\xfe bad\r\n" + b"x" * 300_000 + b"\nend\n")
    bad, long, end = texts(TrialLogs(files))
    assert bad.endswith(" bad")
    assert (len(long), end) == (300_000, "end")


def test_following_sees_new_lines_new_workers_and_new_attempts(files: TrialFiles) -> None:
    write(files, 1, "supervisor", "a")
    later = [(1, "model_worker/0", "b"), (2, "supervisor", "c")]

    def sleep(seconds: float) -> None:
        assert seconds > 0
        attempt, worker, text = later.pop(0)
        write(files, attempt, worker, text)

    followed = TrialLogs(files).follow(lambda: not later, sleep=sleep)
    assert [line.text for line in followed] == ["a", "b", "c"]


def test_prefixes_line_up(files: TrialFiles) -> None:
    write(files, 1, "supervisor", "a")
    write(files, 1, "model_worker/0", "b")
    logs = TrialLogs(files)
    shown = prefixes(logs.workers(), attempts=False)
    assert [shown(line) for line in logs.read()] == ["model_worker/0 | b", "supervisor     | a"]
    assert worker_of(Path("model_worker-12.log")) == "model_worker/12"


def test_a_trial_without_attempts_has_no_lines(files: TrialFiles) -> None:
    logs = TrialLogs(files)
    logs.check()
    assert texts(logs) == []


def test_the_last_lines_of_all_logs_together(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = TrialFiles(file_root / "runs" / user_name() / "e" / "run1")
    for worker, hour in (("master_worker/0", 1), ("model_worker/0", 2)):
        log = files.attempt(1).log(worker)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"2026-01-0{d}T0{hour}:00:00 {hour}.{d}\n" for d in (1, 2, 3)))
    files.plan.write_text("{}")

    def shown(*words: str) -> list[str]:
        assert run(["logs", "e/run1", *words]) == 0
        return [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()]

    assert shown("--tail", "3") == ["2.2", "1.3", "2.3"]
    assert shown("-n", "1", "master_worker/0") == ["1.3"]
    assert shown("--tail", "2", "--grep", r"2\.") == ["2.2", "2.3"]
    assert shown("--tail", "0") == []
    assert len(shown("--tail", "99")) == len(shown()) == 6
    assert run(["logs", "e/run1", "--tail", "1", "--json"]) == 0
    assert [line["text"][-3:] for line in json.loads(capsys.readouterr().out)["lines"]] == ["2.3"]
