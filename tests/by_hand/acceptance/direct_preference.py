"""Does a policy learn made preferences by DPO, without a reward model? By hand; 20 minutes.

    python tests/by_hand/acceptance/direct_preference.py  writes results/direct_preference.json

A policy is fine-tuned once (``sft-math``). For each seed, its answers to arithmetic questions are sampled,
pairs are made of a right and a wrong one to the same question, as for ``reward_model.py``, and recipe
``dpo`` trains the policy on them. Of 200 held-out pairs it must prefer the right answer in 80 % (chance:
50 %). Its right answers to 500 held-out questions, before and after, are written too, and have no bound.
Settings, seeds and bound were fixed before the runs; all results are written, whatever they are.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1] / "support")]

from bits import Tree  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from reward_model import SAMPLING, column, product, trial, write_pairs  # noqa: E402
from tasks_learn import minutes_since  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

SEEDS = (2, 3, 4)
LEAST_RIGHT = 0.8
TRAINING = (
    "loss=dpo",
    "loss.beta=1",
    "model.optimizer.lr=3e-4",
    "exp_ctrl.total_train_epochs=3",
    "task.eval_size=200",
)
ASKING = ("exp_ctrl.benchmark_steps=1", "train_bs_n_seqs=8", "task.eval_size=500")


def result_of_seed(tree: Tree, policy: Path, seed: int) -> dict[str, Any]:
    """Samples, trains on pairs, and asks the policy before and after."""
    began = time.monotonic()
    words = (f"seed={seed}", f"actor.path={policy}")
    sampled = trial(tree, "grpo-math", f"answers-{seed}", *words, *SAMPLING)
    file = tree.file_root / f"pairs-{seed}.jsonl"
    pairs = write_pairs(sampled, file, AutoTokenizer.from_pretrained(policy))
    words = (f"seed={seed}", f"task.path={file}", f"model.path={policy}")
    trained = trial(tree, "dpo", f"dpo-{seed}", *words, *TRAINING)
    chosen = column(trained, "dpo_train/chosen_logprob$")
    return {
        "seed": seed,
        "pairs": pairs,
        "held_out_pairs_right": column(trained, "eval/accuracy$"),
        "chosen_logprob_first_last": [chosen[0], chosen[-1]],
        "right_answers_before": right_answers(tree, policy, f"before-{seed}", seed),
        "right_answers_after": right_answers(
            tree, product(trained, "model"), f"after-{seed}", seed
        ),
        "minutes": minutes_since(began),
    }


def right_answers(tree: Tree, policy: Path, name: str, seed: int) -> float:
    """The share of held-out questions that a policy answers rightly, before any step."""
    words = (f"seed={seed}", f"actor.path={policy}", *ASKING)
    return column(trial(tree, "grpo-math", name, *words), "eval/accuracy$")[0]


def main() -> int:
    """Returns 0 where the policy of each seed prefers right answers."""
    check = HandCheck(__file__)
    with tempfile.TemporaryDirectory(prefix="realsys-direct-preference-") as folder:
        tree = Tree(ROOT, Path(folder))
        try:
            policy = product(trial(tree, "sft-math", "policy"), "model")
            found = []
            for seed in SEEDS:
                found.append(result_of_seed(tree, policy, seed))
                sys.stdout.write(f"{found[-1]}\n")
                sys.stdout.flush()
        finally:
            tree.stop_all()
    return check.write(
        "a policy trained on made preferences prefers right answers",
        [
            f"seed {one['seed']}: {one['held_out_pairs_right'][-1]:.3f} of the held-out pairs"
            for one in found
            if one["held_out_pairs_right"][-1] < LEAST_RIGHT
        ],
        settings={"answers": SAMPLING, "dpo": TRAINING, "questions": ASKING},
        seeds=found,
    )


if __name__ == "__main__":
    sys.exit(main())
