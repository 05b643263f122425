"""A copied trial's records are of the original: who acts on them would act on that one."""

from __future__ import annotations

import shutil
from pathlib import Path

import golden
import pytest
from stand_in_slurm import make_plan, write_plan

from launcher.control.stop import stop
from launcher.trials.copies import refuse_copy
from launcher.trials.find_trials import find_own_trial
from realsys.api.errors import TrialError
from realsys.trial.records import TrialFiles


@pytest.fixture
def original(tmp_path: Path) -> TrialFiles:
    return write_plan(make_plan(tmp_path))


def everything(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_copy_is_not_acted_upon_and_nothing_is_written(original: TrialFiles) -> None:
    copy = TrialFiles(original.root.with_name("copy"))
    shutil.copytree(original.root, copy.root)
    before = everything(original.root.parent)
    acts = (
        lambda: stop(copy, grace_s=1.0),
        lambda: refuse_copy(copy, moved_too=True),
        lambda: find_own_trial(str(copy.root)),  # tell, exec, scale
    )
    for act in acts:
        with golden.raises(TrialError) as refused:
            act()
        assert str(original.root) in refused.value.what
    assert everything(original.root.parent) == before


def test_the_trial_itself_is_none_also_by_a_link(original: TrialFiles, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(original.root)
    for files in (original, TrialFiles(link)):
        refuse_copy(files, moved_too=True)


def test_a_moved_one_can_be_stopped_but_not_resumed(original: TrialFiles) -> None:
    moved = TrialFiles(original.root.with_name("moved"))
    original.root.rename(moved.root)
    refuse_copy(moved, moved_too=False)
    with golden.raises(TrialError):
        refuse_copy(moved, moved_too=True)


def test_a_plan_that_can_not_be_read_is_told_by_others(original: TrialFiles) -> None:
    original.plan.write_text("{")
    refuse_copy(original, moved_too=True)
