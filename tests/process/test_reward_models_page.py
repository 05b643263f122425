"""The commands of docs/reward_models.md, as a user launches them, on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_pages import DocPage
from real_trials import SMALL_PPO, Trials, explain, metrics_of

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.trial.trial_state import State

PAGE = DocPage("reward_models.md")
TRAINING = ("exp_ctrl.total_train_epochs=2", "train_bs_n_seqs=16", "task.eval_size=16")
STEPS = 2
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    policy, pairs = tmp_path / "policy", tmp_path / "pairs.jsonl"
    record = json.loads(PAGE.blocks("json")[0])
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    corpus = [problem["prompt"] + problem["answer"] for problem in problems]
    build_tiny_llama(policy, seed=1, corpus=corpus, vocab_size=320, **SIZES)
    pairs.write_text("".join(json.dumps(record) + "\n" for _ in range(80)))
    trials = Trials(tmp_path / "root")
    try:
        _run_all(trials, {"POLICY": str(policy), "pairs.jsonl": str(pairs)})
    finally:
        trials.end_all()


def _run_all(trials: Trials, names: dict[str, str]) -> None:
    launches = PAGE.commands("launch")
    assert len(launches) == 3
    for number, (experiment, *words) in enumerate(launches):
        given = [re.sub(r"(?<==)(POLICY|MODEL|pairs\.jsonl)$", _of(names), w) for w in words]
        is_training = experiment == "reward-model"
        small = TRAINING if is_training else (*SMALL_PPO, f"exp_ctrl.benchmark_steps={STEPS}")
        small = (*small, "scheduling.model_worker.cpu=1", "tensorboard=false")
        files = trials.launch(experiment, f"run{number}", *given, *small)
        view = trials.wait(files)
        assert view.state is State.COMPLETED, explain(files, view)
        rows = metrics_of(files)
        if is_training:
            names["MODEL"] = str(files.root / "checkpoints" / "model" / "latest")
            assert [row for row in rows if "eval/accuracy" in row][-1]["eval/accuracy"] == 1.0
            continue
        scored = [row for row in rows if "critic/score/mean" in row]
        assert len(scored) == STEPS
        weight, rule_weight = (0.3, 1.0) if number == 1 else (1.0, 0.0)
        for row in scored:
            parts = [float(row[f"rew_inf/reward/{part}"]) for part in ("model", "rule")]
            assert row["critic/score/mean"] == pytest.approx(
                weight * parts[0] + rule_weight * parts[1], abs=1e-5
            )


def _of(names: dict[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda match: names[match[1]]
