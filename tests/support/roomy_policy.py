"""A tiny policy whose context has room for an agent's tools, and runs of it of a few seconds."""

from __future__ import annotations

import json
from pathlib import Path

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.models.from_scratch.tiny_llama import build_tiny_llama

SHORT_RUN = (
    "scheduling.model_worker.cpu=1",
    "task.train_size=64",
    "task.eval_size=4",
    "train_bs_n_seqs=4",
    "group_size=2",
    "gen.max_new_tokens=12",
    "exp_ctrl.benchmark_steps=2",
)
SHORT_RUN_STEPS = 2


def make_roomy_policy(folder: Path, *, positions: int = 1024) -> Path:
    """A random policy in ``folder``, with as many positions."""
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    build_tiny_llama(
        folder,
        seed=1,
        corpus=[p["prompt"] + p["answer"] for p in problems],
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
    )
    config = folder / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": positions})
    )
    return folder
