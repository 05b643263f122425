"""A resume warns of steps whose checkpoint is gone."""

from __future__ import annotations

from pathlib import Path

from launcher.submit.submit import lost_steps_warning
from realsys.trial.records import TrialFiles


def trial(tmp_path: Path, *, steps: int, checkpoint: bool) -> TrialFiles:
    files = TrialFiles(tmp_path)
    phase = files.phase(tmp_path)
    phase.metrics.write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(steps)))
    if checkpoint:
        (phase.recover / "step-000002").mkdir(parents=True)
    return files


def test_steps_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    warning = lost_steps_warning(trial(tmp_path, steps=3, checkpoint=False))
    assert "3 steps" in warning
    assert str(tmp_path / "recover") in warning


def test_nothing_is_said_where_nothing_is_lost(tmp_path: Path) -> None:
    assert lost_steps_warning(TrialFiles(tmp_path)) == ""
    assert lost_steps_warning(trial(tmp_path, steps=0, checkpoint=False)) == ""
    assert lost_steps_warning(trial(tmp_path, steps=3, checkpoint=True)) == ""
