"""Does a reward model trained on made preferences improve the true score? By hand; half an hour.

    python tests/by_hand/acceptance/reward_model.py        writes results/reward_model.json beside this file

A policy is fine-tuned once (``sft-math``). For each seed, its answers to arithmetic questions are sampled,
pairs are made of a right and a wrong one to the same question, a reward model is trained on them, and
GRPO runs with the model as the only reward (``rule_weight=0``): the true score is only measured, on
held-out questions. The control is the same run with less KL penalty: it shows over-optimization where there
is any.
Recipe and seeds were fixed before the runs; all results are written, whatever they are.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bits import ROOT, Tree, _git, write
from transformers import AutoTokenizer

RESULT = Path(__file__).parent / "results" / "reward_model.json"
SEEDS = (2, 3, 4)
ONE_CPU = "scheduling.model_worker.cpu=1"
SAMPLING = ("schedule=rollout", "exp_ctrl.benchmark_steps=100", "task.eval_size=0")
TRAINING = (
    "model.optimizer.lr=1e-3",
    "model.optimizer.lr_schedule=linear",
    "exp_ctrl.total_train_epochs=6",
    "centering=0.01",
    "task.eval_size=200",
)
RUN = (
    "reward_model.weight=0.3",
    "reward_model.rule_weight=0",
    "exp_ctrl.benchmark_steps=60",
    "exp_ctrl.eval_freq_steps=20",
)
KL = {"run": 0.2, "control": 0.01}
PAIRS_OF_A_QUESTION = 2


def trial(tree: Tree, experiment: str, name: str, *words: str) -> Path:
    """Runs a trial to its end; returns its folder."""
    words = (*words, ONE_CPU, "tensorboard=false")
    tree.realsys("launch", experiment, "--trial", name, "--detach", *words)
    (folder,) = tree.file_root.glob(f"runs/*/{experiment}/{name}")
    tree.wait(folder)
    return folder


def product(folder: Path, role: str) -> Path:
    """The newest saved checkpoint of a role."""
    found = (p for p in folder.rglob(f"{role}/step-*") if (p / "config.json").is_file())
    return max(found, key=lambda p: p.name)


def write_pairs(folder: Path, file: Path, tokenizer: Any) -> int:
    """Pairs right with wrong answers of a question, of those that ended; returns how many there are."""
    end, specials = (
        tokenizer.eos_token,
        re.compile("|".join(map(re.escape, tokenizer.all_special_tokens))),
    )
    rows = [json.loads(x) for f in folder.rglob("rollouts/*.jsonl") for x in f.open()]
    pairs = []
    for row in (row for row in rows if "texts" in row):
        answers = [e["sequences"][0]["pieces"][0]["text"] for e in row["texts"]["episodes"]]
        scored = list(zip(answers, row["rewards"], strict=True))
        right, wrong = (
            list(
                dict.fromkeys(
                    specials.sub("", a) for a, r in scored if a.endswith(end) and (r > 0.5) == good
                )
            )
            for good in (True, False)
        )
        for chosen, rejected in itertools.islice(zip(right, wrong), PAIRS_OF_A_QUESTION):  # noqa: B905
            prompt = specials.sub("", row["texts"]["prompt"])
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return len(pairs)


def column(folder: Path, ending: str) -> list[float]:
    """All values of a metric, in the order of steps."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [row[key] for row in rows for key in row if re.search(ending, key)]


def result_of_seed(tree: Tree, policy: Path, seed: int) -> dict[str, Any]:
    """Samples, trains a reward model, and runs with it."""
    common = (f"seed={seed}", f"actor.path={policy}")
    sampled = trial(tree, "grpo-math", f"answers-{seed}", *common, *SAMPLING)
    file = tree.file_root / f"pairs-{seed}.jsonl"
    words = (f"seed={seed}", f"task.path={file}", f"model.path={policy}")
    found: dict[str, Any] = {
        "seed": seed,
        "pairs": write_pairs(sampled, file, AutoTokenizer.from_pretrained(policy)),
    }
    trained = trial(tree, "reward-model", f"model-{seed}", *words, *TRAINING)
    found["held_out_pairs_right"] = column(trained, "eval/accuracy$")[-1]
    score = f"reward_model.path={product(trained, 'model')}"
    for name, kl in KL.items():
        words = (*common, score, f"algorithm.kl_ctl={kl}", *RUN)
        folder = trial(tree, "grpo-math", f"{name}-{seed}", *words)
        by_model = column(folder, "rew_inf/reward/model$")
        found[name] = {
            "kl_ctl": kl,
            "true_score_held_out": column(folder, "eval/accuracy$"),
            "model_score_first_last": [by_model[0], by_model[-1]],
        }
    return found


def main() -> int:
    """Returns 0 where the true score rose for every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="keeps the trials there")
    parser.add_argument("--policy", type=Path, help="a policy by sft-math; none: it is made")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="realsys-reward-model-") as own:
        tree = Tree(ROOT, options.root or Path(own))
        try:
            policy = options.policy or product(trial(tree, "sft-math", "policy"), "model")
            seeds = [result_of_seed(tree, policy, seed) for seed in SEEDS]
        finally:
            tree.stop_all()
    scores = [found["run"]["true_score_held_out"] for found in seeds]
    problems = [
        f"seed {seed}: {values[0]:.3f} → {values[-1]:.3f}"
        for seed, values in zip(SEEDS, scores, strict=True)
        if values[-1] <= values[0]
    ]
    record = {
        "what": "GRPO with a reward model trained on made preferences; the true score is only measured",
        "command": "python tests/by_hand/acceptance/reward_model.py",
        "revision": _git(ROOT, "rev-parse", "HEAD"),
        "changed": bool(_git(ROOT, "status", "--porcelain", "--untracked-files=no")),
        "at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "ok": not problems,
        "problems": problems,
        "settings": {"answers": SAMPLING, "reward-model": TRAINING, "grpo-math": RUN},
        "seeds": seeds,
    }
    write(record, RESULT)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its trials are stopped
    sys.exit(main())
