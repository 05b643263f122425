"""docs/environments.md: its server of tools, to a tiny policy's first training steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of
from roomy_policy import SHORT_RUN, SHORT_RUN_STEPS, make_roomy_policy

from realsys.trial.trial_state import State

PAGE = DocPage("environments.md")


def test_the_page_leads_to_training_steps(
    module_trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PAGE.write_code(tmp_path, "my_tools.py")
    make_roomy_policy(tmp_path / "MODEL")
    ((experiment, *words),) = PAGE.commands("launch", "task.env=mcp")
    monkeypatch.chdir(tmp_path)  # as a user would, in an environment that is activated
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    files = module_trials.launch(experiment, "mcp", *in_folder(tmp_path, words), *SHORT_RUN)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "rollout/agent/turns" in row]
    assert len(rows) == SHORT_RUN_STEPS
    for row in rows:
        assert row["rollout/agent/turns"] >= 1
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/full_context"] == 0
