"""Do tasks other than arithmetic learn, and does a random reward teach nothing? By hand; an hour.

    python tests/by_hand/acceptance/tasks_learn.py         writes results/tasks_learn.json beside this file
    python tests/by_hand/acceptance/tasks_learn.py draw    and docs/pictures/tasks_learn.png from it

Two tasks of reasoning-gym and the functions of docs/code_tasks.md, scored by their tests in a sandbox. For
each seed a policy is made, fine-tuned on worked answers until it can do a part of the task, and trained
by GRPO; the share of held-out questions that it answers rightly must rise by 20 points. The control starts
from the fine-tuned policies of the first task, and tosses a coin for each answer: it must not rise, on
average. Recipes, seeds and bounds were fixed before the runs; all results are written, whatever they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1] / "support")]

from bits import Tree  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from doc_pages import DocPage  # noqa: E402

from realsys.observability.metrics import read_metrics  # noqa: E402

RESULT = HERE / "results" / "tasks_learn.json"
PICTURE = ROOT / "docs" / "pictures" / "tasks_learn.png"
SEEDS = (2, 3, 4)
LEAST_RISE, MOST_BY_CHANCE = 0.2, 0.05
EVERYWHERE = ("scheduling.model_worker.cpu=2", "tensorboard=false", "exp_ctrl.eval_freq_steps=10")
COIN = """
import random

from realsys.api.registry import register_reward

tosses = random.Random(1)
register_reward("coin", lambda response: float(tosses.random() < 0.5), trusted=True)
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One task: what is launched, and how long."""

    experiment: str = "grpo-math"
    both: tuple[
        str, ...
    ]  # settings of the task and of the fine-tuning's task, without their names' heads
    others: tuple[str, ...]

    def words(self) -> list[str]:
        """The settings of a launch."""
        return [f"{head}{word}" for word in self.both for head in ("", "sft.")] + list(self.others)


RECIPES = {
    "leg_counting": Recipe(
        both=(
            "task=reasoning_gym",
            "task.names=[leg_counting]",
            "task.config.leg_counting={min_animals: 2, max_animals: 2, min_instances: 1, max_instances: 4}",
        ),
        others=(
            "task.eval_size=500",
            "sft.exp_ctrl.benchmark_steps=340",
            "exp_ctrl.benchmark_steps=150",
        ),
    ),
    "spell_backward": Recipe(
        both=(
            "task=reasoning_gym",
            "task.names=[spell_backward]",
            "task.config.spell_backward={min_word_len: 3, max_word_len: 5}",
        ),
        others=(
            "task.eval_size=500",
            "sft.init.vocab_size=300",
            "sft.exp_ctrl.benchmark_steps=250",
            "exp_ctrl.benchmark_steps=100",
        ),
    ),
    "functions": Recipe(
        experiment="grpo-functions",
        both=("task.steps=3",),
        others=(
            "task.eval_size=200",
            "sft.model.optimizer.lr=5e-4",
            "sft.exp_ctrl.benchmark_steps=52",
            "train_bs_n_seqs=32",
            "gen.max_new_tokens=48",
            "exp_ctrl.benchmark_steps=50",
        ),
    ),
}


class Runs:
    """Trials under one file root, one after another."""

    def __init__(self, folder: Path) -> None:
        self.tree = Tree(ROOT, folder / "root")
        DocPage("code_tasks.md").write_code(folder, "functions.py")
        (folder / "coin.py").write_text(COIN)
        self._code = [w for f in ("functions.py", "coin.py") for w in ("--import", str(folder / f))]

    def run(self, experiment: str, name: str, words: Sequence[str]) -> Path:
        """Runs a trial to its end; returns its folder."""
        words = (*words, *EVERYWHERE)
        self.tree.realsys("launch", experiment, "--trial", name, "--detach", *self._code, *words)
        (folder,) = self.tree.file_root.glob(f"runs/*/{experiment}/{name}")
        self.tree.wait(folder)
        return folder

    def learned(self, task: str, recipe: Recipe, seed: int) -> tuple[dict[str, Any], Path]:
        """Runs a recipe; returns what it learned, and its folder."""
        began = time.monotonic()
        words = (*recipe.words(), f"seed={seed}", f"sft.seed={seed}")
        folder = self.run(recipe.experiment, f"{task}-{seed}", words)
        return {"seed": seed, **curve(folder), "minutes": minutes_since(began)}, folder

    def by_chance(self, recipe: Recipe, seed: int, policy: Path) -> dict[str, Any]:
        """Runs a recipe from its policy with a coin as its reward; the true score decides what is right."""
        began = time.monotonic()
        rule = "task.reward=0*reasoning_gym + coin"
        words = [w for w in recipe.words() if not w.startswith("sft.")]
        words += [f"actor.path={policy}", f"seed={seed}", rule]
        folder = self.run(recipe.experiment, f"coin-{seed}", words)
        return {"seed": seed, **curve(folder), "minutes": minutes_since(began)}


def minutes_since(began: float) -> float:
    """Minutes, to a tenth."""
    return round((time.monotonic() - began) / 60, 1)


def curve(folder: Path) -> dict[str, Any]:
    """Held-out accuracy after which steps."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "eval/accuracy" in row]
    return {
        "steps": [row["step"] for row in rows],
        "accuracy": [round(row["eval/accuracy"], 4) for row in rows],
    }


def fine_tuned(folder: Path) -> Path:
    """The policy that a trial's fine-tuning saved."""
    found = (p for p in folder.rglob("model/step-*") if (p / "config.json").is_file())
    return max(found, key=lambda p: p.name)


def rise(found: dict[str, Any]) -> float:
    """From the first to the last evaluation."""
    return float(found["accuracy"][-1] - found["accuracy"][0])


def main() -> int:
    """Returns 0 where every bound holds."""
    check = HandCheck(__file__)
    tasks: dict[str, list[dict[str, Any]]] = {}
    coin: list[dict[str, Any]] = []
    first = next(iter(RECIPES))
    with tempfile.TemporaryDirectory(prefix="realsys-tasks-learn-") as folder:
        runs = Runs(Path(folder))
        try:
            for seed in SEEDS:
                for task, recipe in RECIPES.items():
                    found, made = runs.learned(task, recipe, seed)
                    tasks.setdefault(task, []).append(found)
                    say(task, found)
                    if task == first:
                        coin.append(runs.by_chance(recipe, seed, fine_tuned(made)))
                        say("coin", coin[-1])
        finally:
            runs.tree.stop_all()
    problems = [
        f"{task}, seed {found['seed']}: a rise of {rise(found):.3f}"
        for task, seeds in tasks.items()
        for found in seeds
        if rise(found) < LEAST_RISE
    ]
    if (mean := fmean(map(rise, coin))) > MOST_BY_CHANCE:
        problems.append(f"a coin as the reward: a mean rise of {mean:.3f}")
    settings = {name: [recipe.experiment, *recipe.words()] for name, recipe in RECIPES.items()}
    return check.write(
        "held-out accuracy of tasks that are learned, and with a coin as the reward",
        problems,
        settings=settings,
        tasks=tasks,
        coin=coin,
    )


def say(task: str, found: dict[str, Any]) -> None:
    """One line, so that a person sees how far it is."""
    ends = f"{found['accuracy'][0]:.3f} → {found['accuracy'][-1]:.3f}"
    sys.stdout.write(f"{task} seed {found['seed']}: {ends} in {found['minutes']} min\n")
    sys.stdout.flush()


def draw() -> int:
    """Draws the curves."""
    from matplotlib.figure import Figure

    found = json.loads(RESULT.read_text())
    panels = {**found["tasks"], "leg_counting by a coin": found["coin"]}
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, (title, seeds) in zip(
        figure.subplots(1, 4, sharey=True), panels.items(), strict=True
    ):
        for one in seeds:
            axes.plot(one["steps"], one["accuracy"], label=f"seed {one['seed']}", lw=1.6)
        axes.set(title=title, xlabel="GRPO step", ylim=(0, 1.03))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out accuracy")
    figure.axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(PICTURE, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(draw() if sys.argv[1:] == ["draw"] else main())
