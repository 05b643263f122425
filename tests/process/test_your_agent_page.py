"""The user story of docs/your_agent.md: a third-party agent and a plain program, to their first
training steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

PAGE = DocPage("your_agent.md")
STEPS = 2
SMALL = (
    "scheduling.model_worker.cpu=1",
    "task.train_size=64",
    "task.eval_size=4",
    "train_bs_n_seqs=4",
    "group_size=2",
    "gen.max_new_tokens=12",
    f"exp_ctrl.benchmark_steps={STEPS}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and a model whose context has room for an agent's tools."""
    folder = tmp_path_factory.mktemp("agent")
    PAGE.write_code(folder, "my_agent.py", "my_program.py")
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    build_tiny_llama(
        folder / "MODEL", seed=1, corpus=[p["prompt"] + p["answer"] for p in problems],
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
    )  # fmt: skip
    config = folder / "MODEL" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024})
    )
    return folder


@pytest.mark.parametrize("kind", ["python", "command"])
def test_the_page_leads_to_training_steps(
    module_trials: Trials, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ((experiment, *words),) = PAGE.commands("launch", f"task.agent={kind}")
    monkeypatch.chdir(folder)  # as a user would
    files = module_trials.launch(experiment, kind, *in_folder(folder, words), *SMALL)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "rollout/agent/calls" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert row["rollout/agent/calls"] >= 1
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/failed"] == 0
        assert row["rollout/agent/unread_answers"] == 0
    if kind == "command":  # its own reward: 1 for an empty answer, less for a longer one
        assert all(0 < row["rollout/reward"] <= 1 for row in rows)
