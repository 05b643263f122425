"""Compares predicted with measured step times: real trials on this machine, through the command line.

    python benchmarks/bench_prediction.py [--rounds 3] [--steps 20]

Each round profiles one run and predicts others from it: calls that sleep a given time (cost-ppo, which
isolates scheduling from other load), then the tiny policy of ppo-math, whose calls compute. The error
of a prediction is the median over rounds; the goal is 20 %. Runs that compute need an otherwise idle
machine and two cores per worker; the output shows the load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from realsys.api import registry
from realsys.api.plan import read_plan
from realsys.planner.gpu_models import DEVICES
from realsys.planner.placed import place_experiment
from realsys.planner.predict import predict
from realsys.planner.read_profile import formulas_of, read_profile
from realsys.planner.time.profiled import Profile, ProfiledCosts
from realsys.trial.records import TrialFiles

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "support" / "cost_plugin.py"
GOAL = 0.2
TIMEOUT_S = 1800.0

SMALL = (
    "task.eval_size=0",
    "train_bs_n_seqs=32",
    "algorithm.ppo_n_minibatches=2",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.eval_freq_steps=none",
    "scheduling.model_worker.cpu=1",
    "tensorboard=false",
)


@dataclass(frozen=True)
class Run:
    """A trial of a round. ``sources``: the runs whose profiles predict it."""

    name: str
    experiment: str
    settings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


SLEEPING = (
    Run("one worker", "cost-ppo"),
    Run("split", "cost-ppo", ("placement=split", "placement.n_model_workers=2"), ("one worker",)),
    Run(
        "split, generation ahead",
        "cost-ppo",
        ("placement=split", "placement.n_model_workers=2", "schedule=one_step_off"),
        ("one worker",),
    ),
)
COMPUTING = (
    Run("shared d1", "ppo-math"),
    Run("shared d1, again", "ppo-math", ("seed=2",), ("shared d1",)),
    Run("split", "ppo-math", ("placement=split", "placement.n_model_workers=2"), ("shared d1",)),
    Run("shared d2", "ppo-math", ("placement.n_model_workers=2",), ("shared d1",)),
    Run("shared d2, again", "ppo-math", ("placement.n_model_workers=2", "seed=2"), ("shared d2",)),
)


def launch(run: Run, name: str, words: Sequence[str], environment: Mapping[str, str]) -> TrialFiles:
    """Runs a trial to its end."""
    command = [
        sys.executable,
        "-m",
        "launcher.cli.entry",
        "launch",
        run.experiment,
        "--trial",
        name,
    ]
    if run.experiment == "cost-ppo":
        command += ["--import", str(PLUGIN)]
    done = subprocess.run(
        [*command, *words, *run.settings],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{run.name} failed:\n{done.stdout}{done.stderr}")
    runs = Path(environment["REALSYS_FILE_ROOT"]) / "runs"
    (plan,) = runs.glob(f"*/{run.experiment}/{name}/plan.json")
    return TrialFiles(plan.parent)


def errors_of_a_round(
    runs: Sequence[Run], words: Sequence[str], environment: Mapping[str, str], number: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """(run, predicted from) → (predicted, measured) seconds a step."""
    profiles: dict[str, Profile] = {}
    found = {}
    for index, run in enumerate(runs):
        files = launch(run, f"r{number}-{index}", words, environment)
        profiles[run.name] = read_profile(files, DEVICES["cpu"])
        this = place_experiment(read_plan(files.plan))
        formulas = None if this.unknown else formulas_of(this, DEVICES["cpu"])
        for source in run.sources:
            costs = ProfiledCosts([profiles[source]], formulas)
            predicted = predict(this, costs, basis=source).figures.wall_s
            found[run.name, source] = (predicted, profiles[run.name].wall_s)
    return found


def print_table(
    title: str, rounds: Sequence[Mapping[tuple[str, str], tuple[float, float]]]
) -> bool:
    """Medians over rounds; whether all are within the goal."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    say(f"\n{title} (load {load:.1f} a core)\n")
    say("| run | predicted from | predicted | measured | error, median | worst |")
    say("|---|---|---:|---:|---:|---:|")
    good = True
    for key in rounds[0]:
        pairs = [found[key] for found in rounds]
        errors = [(predicted - measured) / measured for predicted, measured in pairs]
        middle = median(errors)
        good = good and abs(middle) <= GOAL
        say(
            f"| {key[0]} | {key[1]} | {median(p for p, _ in pairs):.3f} s | "
            f"{median(m for _, m in pairs):.3f} s | {middle:+.1%} | {max(errors, key=abs):+.1%} |"
        )
    return good


def say(line: str) -> None:
    """A line of the answer, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--only", choices=("sleeping", "computing"), help="one of the two parts")
    given = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="realsys-bench-") as folder:
        environment = {**os.environ, "REALSYS_FILE_ROOT": folder, "NO_COLOR": "1"}
        steps = f"exp_ctrl.benchmark_steps={given.steps}"
        small = (*SMALL, steps, f"task.train_size={32 * given.steps}")
        parts = {
            "sleeping": ("calls that sleep", SLEEPING, small),
            "computing": ("calls that compute", COMPUTING, small),
        }
        for name, (title, runs, words) in parts.items():
            if given.only in (None, name):
                if name == "sleeping":
                    registry.load_plugins([str(PLUGIN)])
                rounds = [
                    errors_of_a_round(runs, words, environment, number)
                    for number in range(given.rounds)
                ]
                good = print_table(title, rounds) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
