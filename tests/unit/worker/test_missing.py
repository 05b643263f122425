"""Why somebody waits in vain: each case names the worker and what became of it."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from realsys.api.errors import WaitTimeout
from realsys.name_resolve.store_refusals import MOST_NAMED, KeyWait
from realsys.trial.records import AttemptFiles, Failure, WorkerExit, write_record
from realsys.worker.missing import MAX_NAMED, describe_missing

NAME = "model_worker/3"


@pytest.fixture
def files(tmp_path: Path) -> AttemptFiles:
    made = AttemptFiles(tmp_path / "0001")
    made.logs.mkdir(parents=True)
    return made


def told(files: AttemptFiles) -> str:
    line, logs = describe_missing([NAME], files).splitlines()
    assert logs == f"  logs: {files.logs}"
    start, _, rest = line.partition(f"{NAME} has not registered: ")
    assert start == ""
    return rest


def test_one_that_has_not_started(files):
    golden.check(told(files))


def test_one_that_has_said_nothing_yet(files):
    files.log(NAME).touch()
    golden.check(told(files))


def test_one_that_is_still_on_its_way(files):
    files.log(NAME).write_text("first line\nimporting torch\n\n")
    golden.check(told(files))


@pytest.mark.parametrize(
    ("returncode", "hint", "how"),
    [
        (1, "", "ended with code 1 on n2"),
        (-9, "", "killed by signal 9 on n2"),
        (-9, "the node's memory ran out", "killed by signal 9 on n2: the node's memory ran out"),
    ],
)
def test_one_whose_parent_saw_it_end(files, returncode, hint, how):
    ended = WorkerExit(worker=NAME, host="n2", pid=7, returncode=returncode, at=1.0, hint=hint)
    write_record(files.exit_of(NAME), ended)
    assert told(files) == how


def test_one_that_said_why_it_died(files):
    words = Failure(worker=NAME, host="n2", pid=7, why="no such file\nmore", at=1.0)
    write_record(files.failure_record(NAME), words)
    golden.check(told(files))


def test_of_very_many_some_are_named(files):
    names = [f"model_worker/{i}" for i in range(MAX_NAMED + 5)]
    lines = describe_missing(names, files).splitlines()
    assert len(lines) == MAX_NAMED + 2
    assert lines[-2] == "  nor have 5 more"


def test_a_wait_for_very_many_names_some():
    keys = [f"a/b/c/d/e/f/{i}" for i in range(MOST_NAMED + 5)]
    wait = KeyWait(keys, 0.0, describe_missing=None, where="memory://x")
    with pytest.raises(WaitTimeout) as raised:
        wait.left_s({})
    error = raised.value
    golden.check(error)
    assert error.what.endswith(f"a/b/c/d/e/f/{MOST_NAMED - 1} and 5 more")
