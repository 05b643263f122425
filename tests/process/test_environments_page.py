"""docs/environments.md: its server of tools, to a tiny policy's first training steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, metrics_of

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

PAGE = DocPage("environments.md")
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


def test_the_page_leads_to_training_steps(
    module_trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PAGE.write_code(tmp_path, "my_tools.py")
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    build_tiny_llama(
        tmp_path / "MODEL", seed=1, corpus=[p["prompt"] + p["answer"] for p in problems],
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
    )  # fmt: skip
    config = tmp_path / "MODEL" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024})
    )
    ((experiment, *words),) = PAGE.commands("launch", "task.env=mcp")
    monkeypatch.chdir(tmp_path)  # as a user would, in an environment that is activated
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    files = module_trials.launch(experiment, "mcp", *in_folder(tmp_path, words), *SMALL)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    rows = [row for row in metrics_of(files) if "rollout/agent/turns" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert row["rollout/agent/turns"] >= 1
        assert row["rollout/agent/branches"] == 1
        assert row["rollout/agent/full_context"] == 0
