"""The user story of docs/your_agent.md: a third-party agent and a plain program, to their first
training steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of
from roomy_policy import SHORT_RUN, SHORT_RUN_STEPS, make_roomy_policy

from realsys.trial.trial_state import State

PAGE = DocPage("your_agent.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and a model whose context has room for an agent's tools."""
    folder = tmp_path_factory.mktemp("agent")
    PAGE.write_code(folder, "my_agent.py", "my_program.py")
    make_roomy_policy(folder / "MODEL")
    return folder


@pytest.mark.parametrize("kind", ["python", "command"])
def test_the_page_leads_to_training_steps(
    module_trials: Trials, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ((experiment, *words),) = PAGE.commands("launch", f"task.agent={kind}")
    monkeypatch.chdir(folder)  # as a user would
    files = module_trials.launch(experiment, kind, *in_folder(folder, words), *SHORT_RUN)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "rollout/agent/calls" in row]
    assert len(rows) == SHORT_RUN_STEPS
    for row in rows:
        assert row["rollout/agent/calls"] >= 1
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/failed"] == 0
        assert row["rollout/agent/unread_answers"] == 0
    if kind == "command":  # its own reward: 1 for an empty answer, less for a longer one
        assert all(0 < row["rollout/reward"] <= 1 for row in rows)
