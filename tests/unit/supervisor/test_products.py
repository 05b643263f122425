"""Whether a phase is done, also when the supervisor of the attempt that did it was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.supervisor.products import attempt_that_finished, is_done
from realsys.trial.records import AttemptRecord, Resumed, TrialFiles, write_record


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    return TrialFiles(tmp_path)


def attempt(
    files: TrialFiles, number: int, *, went_on: bool = True, done: str = ""
) -> AttemptRecord:
    """One that has begun; ``done`` is the token in its mark."""
    record = AttemptRecord(
        number=number,
        token=f"token {number}",
        host="n1",
        supervisor_pid=1,
        supervisor_start=1,
        started_at=1.0,
    )
    write_record(files.attempt(number).record, record)
    if went_on:
        resumed = Resumed(attempt=number, phase="main", step=0)
        write_record(files.attempt(number).resumed("main"), resumed)
    if done:
        write_record(files.attempt(number).done("main"), {"token": done, "step": 9})
    return record


def test_a_mark_with_the_attempts_own_token_counts(files):
    first = attempt(files, 1, done="token 1")
    assert is_done(files, first, "main")
    assert not is_done(files, first, "sft")
    assert attempt_that_finished(files, "main") == 1


def test_a_mark_with_another_token_does_not(files):
    first = attempt(files, 1, done="token 7")
    assert not is_done(files, first, "main")
    assert attempt_that_finished(files, "main") is None


def test_without_a_mark_nobody_has_finished(files):
    attempt(files, 1)
    attempt(files, 2, went_on=False)
    assert attempt_that_finished(files, "main") is None


def test_who_did_not_get_so_far_is_passed_over(files):
    attempt(files, 1, done="token 1")
    attempt(files, 2, went_on=False)
    assert attempt_that_finished(files, "main") == 1


def test_one_that_others_went_on_after_does_not_count(files):
    """It woke up late: what is done is another branch."""
    attempt(files, 1, done="token 1")
    attempt(files, 2)
    assert attempt_that_finished(files, "main") is None


def test_a_torn_mark_is_none(files):
    attempt(files, 1)
    files.attempt(1).done("main").write_text('{"tok')
    assert attempt_that_finished(files, "main") is None
