"""Whether a phase is done, also if the supervisor of the attempt that did it was lost; and its product."""

from __future__ import annotations

import shutil
from pathlib import Path

import golden
import pytest

from realsys.supervisor import products
from realsys.supervisor.products import attempt_that_finished, is_done, publish
from realsys.trial.records import AttemptRecord, PhaseFiles, Resumed, TrialFiles, write_record


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


# ---- the product ----------------------------------------------------------------------------------

FILES = {f"model-{i}.safetensors": str(i) for i in range(8)}


def trained(folder: Path) -> PhaseFiles:
    """A phase whose model is in eight files."""
    saved = folder / "checkpoints" / "model" / "step-000010"
    saved.mkdir(parents=True)
    for name, text in FILES.items():
        (saved / name).write_text(text)
    (saved.parent / "latest").symlink_to(saved.name)
    return PhaseFiles(folder)


def test_supervisors_with_one_pid_that_publish_at_once_make_one_whole_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = trained(tmp_path / "first"), trained(tmp_path / "second")
    target = tmp_path / "cache" / "sft" / "abc"
    (target.parent / ".abc.12345").mkdir(parents=True)  # of one that was killed
    copy_tree, copied = shutil.copytree, []

    def copy(source: Path, to: Path) -> None:
        def copy_file(one: str, other: str) -> None:
            shutil.copy2(one, other)
            copied.append(other)
            if len(copied) == 3:  # the other trial, on another host, begins and ends meanwhile
                publish(second, target)

        copy_tree(source, to, copy_function=copy_file)

    monkeypatch.setattr(products.shutil, "copytree", copy)
    publish(first, target)
    assert {file.name: file.read_text() for file in target.iterdir()} == FILES
    assert [folder.name for folder in target.parent.iterdir()] == ["abc"]


def test_a_product_that_can_not_be_copied_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase, target = trained(tmp_path / "first"), tmp_path / "cache" / "abc"

    def full(source: Path, to: Path) -> None:
        to.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(products.shutil, "copytree", full)
    with golden.raises(OSError):
        publish(phase, target)
    assert list(target.parent.iterdir()) == []
