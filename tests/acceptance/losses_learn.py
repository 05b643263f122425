"""Does a policy learn by each of the losses, from one start and by as many answers? By hand; half an hour.

    python tests/acceptance/losses_learn.py        writes results/losses_learn.json beside this file
    python tests/acceptance/losses_learn.py draw   and docs/pictures/losses_learn.png from it

A policy is fine-tuned once (``sft-math``). From it ``grpo-math`` learns arithmetic with each loss of
realsys/algorithms/policy/token_losses.py, each with its own defaults, and the share of held-out questions
that is answered rightly must rise by 25 points with every seed. Recipe, seeds and bound were fixed before
the runs; all results are written, whatever they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "support")]

from bits import Tree  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from reward_model import product, trial  # noqa: E402
from tasks_learn import curve, rise  # noqa: E402

RESULT = HERE / "results" / "losses_learn.json"
PICTURE = ROOT / "docs" / "pictures" / "losses_learn.png"
SEEDS = (2, 3, 4)
LEAST_RISE = 0.25
SEQUENCES = "algorithm.loss_aggregation=seq_mean_token_mean"  # as GSPO is published
LOSSES = {"ppo": (), "gspo": (SEQUENCES,), "cispo": (), "sapo": ()}
RUN = ("exp_ctrl.benchmark_steps=100", "exp_ctrl.eval_freq_steps=20", "task.eval_size=500")


def main() -> int:
    """Returns 0 where every loss learned with every seed."""
    check = HandCheck(__file__)
    found: dict[str, list[dict[str, Any]]] = {loss: [] for loss in LOSSES}
    with tempfile.TemporaryDirectory(prefix="realsys-losses-learn-") as folder:
        tree = Tree(ROOT, Path(folder))
        try:
            start = product(trial(tree, "sft-math", "policy"), "model")
            for seed in SEEDS:
                for loss, more in LOSSES.items():
                    words = (f"algorithm.loss={loss}", *more, f"seed={seed}", f"actor.path={start}")
                    made = trial(tree, "grpo-math", f"{loss}-{seed}", *words, *RUN)
                    found[loss].append({"seed": seed, **curve(made)})
                    sys.stdout.write(f"{loss} {found[loss][-1]}\n")
                    sys.stdout.flush()
        finally:
            tree.stop_all()
    problems = [
        f"{loss}, seed {one['seed']}: a rise of {rise(one):.3f}"
        for loss, seeds in found.items()
        for one in seeds
        if rise(one) < LEAST_RISE
    ]
    return check.write(
        "held-out accuracy of grpo-math by each loss, from one start",
        problems,
        settings={"grpo-math": RUN, **LOSSES},
        losses=found,
    )


def draw() -> int:
    """Draws the mean of the seeds of each loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for loss, seeds in json.loads(RESULT.read_text())["losses"].items():
        means = [sum(at) / len(at) for at in zip(*(one["accuracy"] for one in seeds), strict=True)]
        axes.plot(seeds[0]["steps"], means, label=loss, lw=1.6)
    axes.set(xlabel="GRPO step", ylabel="held-out accuracy, mean of the seeds", ylim=(0.4, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(PICTURE, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(draw() if sys.argv[1:] == ["draw"] else main())
