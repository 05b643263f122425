"""No verb proposes a resume that its unreadable plan would make `resume` refuse: it says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from old_trials.unpack import unpack

from launcher.cli.command_line import run


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (lambda text: "{", "launch the trial again"),
        (lambda text: text.replace('"version": 1', '"version": 0'), "that launched the trial"),
    ],
    ids=["damaged", "another version"],
)
@pytest.mark.parametrize(
    ("kind", "name"), [("stopped", "ppo-math/stopped"), ("failed", "ppo-math/failed")]
)
def test_no_resume_is_proposed(
    kind: str,
    name: str,
    change,
    fix: str,
    file_root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (trial,) = unpack(kind, file_root)
    (trial / "plan.json").write_text(change((trial / "plan.json").read_text()))
    for verb in ("wait", "status", "explain"):
        run([verb, name])
        shown = "".join(capsys.readouterr())
        assert "realsys resume" not in shown, verb
        assert fix in shown, verb
