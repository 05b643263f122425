"""Measures the cost of staleness in accuracy: the same questions, synchronous and with stale answers.

``python benchmarks/bench_staleness.py FOLDER [--experiment ppo-math] [--seeds 1 2 3] [--only NAME …]``
runs each schedule of ``SCHEDULES`` for each seed to its end, one after another (a run takes minutes),
keeps the trials under FOLDER, skips those that exist already, and prints the table of
docs/benchmarks.md. Equal samples: every run trains on the same number of answers to the same questions.
``--picture FILE`` receives the curves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests" / "support"
sys.path.insert(0, str(TESTS))

from real_trials import Trials, explain  # noqa: E402

from realsys.observability.metrics import read_metrics  # noqa: E402
from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

# Two chunks an answer, so that new weights come in the middle of answers, too.
_ASYNC = ("schedule=async", "schedule.new_tokens_per_chunk=8")
_DECOUPLED = ("algorithm.use_decoupled_loss=true", "algorithm.correction=cap")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "decoupled, 0": (*_ASYNC, *_DECOUPLED, "schedule.max_staleness=0"),
    "decoupled, 1": (*_ASYNC, *_DECOUPLED, "schedule.max_staleness=1"),
    "decoupled, 2": (*_ASYNC, *_DECOUPLED, "schedule.max_staleness=2"),
    "decoupled, 4": (*_ASYNC, *_DECOUPLED, "schedule.max_staleness=4"),
    "naive, 4": (*_ASYNC, "schedule.max_staleness=4"),
}


def run(
    trials: Trials, experiment: str, schedule: str, seed: int, settings: Sequence[str]
) -> TrialFiles:
    """The trial of a schedule and seed; started if it has not completed yet."""
    name = f"{schedule.replace(', ', '-')}-seed{seed}"
    done = list(trials.file_root.glob(f"runs/*/{experiment}/{name}/attempts/*/exit.json"))
    if done:
        return trials.files(experiment, name)
    words = (f"seed={seed}", f"sft.seed={seed}", *SCHEDULES[schedule], *settings)
    files = trials.launch(experiment, name, *words)
    view = trials.wait(files, timeout_s=3600, every_s=2)
    if view.state is not State.COMPLETED:
        sys.exit(explain(files, view))
    return files


def rows_of(files: TrialFiles) -> list[dict[str, Any]]:
    """All metrics of a trial."""
    return list(read_metrics(files.phase(files.root).metrics))


def accuracies(files: TrialFiles) -> list[tuple[int, float]]:
    """Held-out accuracy by step."""
    return [
        (int(r["step"]), float(r["eval/accuracy"])) for r in rows_of(files) if "eval/accuracy" in r
    ]


def figures(files: TrialFiles) -> tuple[float, float, float]:
    """First and last held-out accuracy (the last is the mean of the last two), and mean staleness."""
    found = [accuracy for _, accuracy in accuracies(files)]
    lags = [float(r["actor/staleness/mean"]) for r in rows_of(files) if _LAG in r]
    return found[0], statistics.fmean(found[-2:]), statistics.fmean(lags) if lags else 0.0


_LAG = "actor/staleness/mean"


def draw(found: dict[tuple[str, int], TrialFiles], path: Path) -> None:
    """Held-out accuracy over steps: a line a schedule, the mean of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for schedule in dict.fromkeys(schedule for schedule, _ in found):
        curves = [dict(accuracies(files)) for (s, _), files in found.items() if s == schedule]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, means, label=schedule, lw=1.6)
    axes.set(xlabel="step", ylabel="held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is missing, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experiment", default="ppo-math", choices=("ppo-math", "grpo-math"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--settings", nargs="+", default=[], help="NAME=VALUE, of all schedules")
    args = parser.parse_args()
    trials = Trials(args.folder)
    found = {}
    for seed in args.seeds:
        for schedule in args.only:
            found[schedule, seed] = run(trials, args.experiment, schedule, seed, args.settings)
            first, last, lag = figures(found[schedule, seed])
            sys.stderr.write(f"{schedule} seed {seed}: {first:.3f} → {last:.3f}, lag {lag:.2f}\n")
    sys.stdout.write("| schedule | mean staleness | " + " | ".join(f"seed {s}" for s in args.seeds))
    sys.stdout.write(" | mean |\n|---|---:|" + "---:|" * (len(args.seeds) + 1) + "\n")
    for schedule in args.only:
        rows = [figures(found[schedule, seed]) for seed in args.seeds]
        lag = statistics.fmean(row[2] for row in rows)
        each = " | ".join(f"{row[1]:.1%}" for row in rows)
        mean = statistics.fmean(row[1] for row in rows)
        sys.stdout.write(f"| {schedule} | {lag:.2f} | {each} | {mean:.1%} |\n")
    if args.picture is not None:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
