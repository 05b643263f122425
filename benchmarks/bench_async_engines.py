"""Measures the speed-up of asynchronous training with real engines: two generation servers, one trainer.

    python benchmarks/bench_async_engines.py [--trainer given] [--rounds 2] [--steps 24] [--width 256]

One thread each. The policy's answer lengths are geometric with a mean of an eighth of the maximum
(``uniform_policy.py``); ``grpo-math`` as a user launches it, ``--questions`` with 8 answers each per
step. *turns*: ``schedule.max_staleness=0``, servers and trainer wait for each other. *generation alone* is
``schedule=rollout``, without training; it is measured before and after each schedule, and their mean gives
its bound, because a machine's speed drifts. Start and end of each run do not count. The table has
medians over the rounds, of ratios within a round.

``--trainer given``, for two cores: the servers use them, and the trainer sleeps as if it had a third
(``given_cost.py``), exactly as fast as the servers alone at the start of the round. At best neither
waits: the *bound* is the slower one's speed alone.

``--trainer real``: two cores do the work of three processes. *training alone* is ``schedule=replay``, a
trainer that never waits. At best the two cores do both halves' work without a pause: the *bound* is one
over the sum of each half's cost per token alone, in seconds of both cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]

from real_trials import Trials, explain  # noqa: E402
from uniform_policy import MEAN_LENGTH, grpo_words, make_policy, make_questions  # noqa: E402

from realsys.observability.events import StepEvent, read_events  # noqa: E402
from realsys.observability.metrics import read_metrics  # noqa: E402
from realsys.trial.records import TrialFiles  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

GROUP, LONGEST = 8, 8 * MEAN_LENGTH
GENERATION, TRAINING = "generation alone", "training alone"
EDGE = 3  # steps at both ends that do not count
SCHEDULES = {
    "turns": ("schedule=async", "schedule.max_staleness=0"),
    "η = 1": ("schedule=async", "schedule.max_staleness=1"),
    "η = 2": ("schedule=async", "schedule.max_staleness=2"),
    "η = 4": ("schedule=async", "schedule.max_staleness=4"),
}


@dataclass
class Bench:
    """Policy and questions in ``folder``, trials beside them."""

    folder: Path
    args: argparse.Namespace

    def __post_init__(self) -> None:
        args = self.args
        self.policy = make_policy(
            self.folder / "policy", width=args.width, layers=args.layers, heads=args.width // 32
        )
        self.questions = make_questions(
            self.folder / "questions.jsonl", args.questions * args.steps
        )
        self.trials = Trials(self.folder / "trials")

    def run(self, name: str, *words: str, experiment: str = "grpo-math") -> TrialFiles:
        """A whole trial."""
        files = self.trials.launch(
            experiment,
            name,
            *grpo_words(
                self.policy,
                self.questions,
                batch=self.args.questions,
                group=GROUP,
                longest=LONGEST,
            ),
            "scheduling.model_worker.cpu=1",
            "schedule.servers=2",
            f"schedule.server_args.max_running={self.args.rows}",
            f"schedule.max_concurrent_rollouts={5 * self.args.questions}",
            *words,
        )
        view = self.trials.wait(files, timeout_s=1800, every_s=2)
        if view.state is not State.COMPLETED:
            sys.exit(explain(files, view))
        return files


def trained_per_s(files: TrialFiles, batch: int) -> float:
    """New tokens a second that were trained on, without the first and last steps."""
    phase = files.phase(files.root)
    ends = {e.step: e.end for e in read_events(phase.events) if isinstance(e, StepEvent)}
    length = "response_length/mean"
    tokens = {r["step"]: r[length] * batch for r in read_metrics(phase.metrics) if length in r}
    first, last = EDGE, max(ends) - EDGE
    return sum(tokens[step] for step in range(first + 1, last + 1)) / (ends[last] - ends[first])


def made_per_s(files: TrialFiles) -> float:
    """New tokens a second of answers that were finished in the middle half of a run."""
    logs = files.root.glob("rows/*/rollouts/*.jsonl")
    rows = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    begin, end = min(r["at"] - r["seconds"] for r in rows), max(r["at"] for r in rows)
    middle = (begin + (end - begin) / 4, end - (end - begin) / 4)
    tokens = sum(sum(r["answer_lengths"]) for r in rows if middle[0] < r["at"] <= middle[1])
    return tokens / (middle[1] - middle[0])


@dataclass(frozen=True)
class Round:
    """Tokens a second, by schedule, and what each could have reached."""

    reached: dict[str, float]
    bounds: dict[str, float]


def measure(bench: Bench, number: int) -> Round:
    """One round of all schedules."""
    args, reached = bench.args, dict[str, float]()
    generation = [_generation_alone(bench, f"rollouts-{number}-0")]
    experiment, given, training = "grpo-math", tuple[str, ...](), generation[0]
    if args.trainer == "real":
        training = _training_alone(bench, number)
    else:
        experiment = "grpo-given-cost"
        given = ("--import", str(HERE / "given_cost.py"), f"train_tokens_per_s={training}")
    for i, (name, words) in enumerate(SCHEDULES.items(), start=1):
        files = bench.run(f"async-{number}-{i}", *given, *words, experiment=experiment)
        reached[name] = _told(name, trained_per_s(files, args.questions * GROUP))
        generation.append(_generation_alone(bench, f"rollouts-{number}-{i}"))
    beside = [statistics.mean(pair) for pair in itertools.pairwise(generation)]
    bounds = [bound(speed, training, args.trainer) for speed in beside]
    return Round(reached, dict(zip(reached, bounds, strict=True)))


def _generation_alone(bench: Bench, name: str) -> float:
    at_once = f"schedule.max_in_flight={3 * bench.args.questions}"  # as with η = 2
    return _told(GENERATION, made_per_s(bench.run(name, "schedule=rollout", at_once)))


def _training_alone(bench: Bench, number: int) -> float:
    made = bench.trials.files("grpo-math", f"rollouts-{number}-0").root
    words = (f"schedule.max_staleness={bench.args.steps}", f"schedule.folder={made}")
    learnt = bench.run(f"train-{number}", "schedule=replay", *words)
    return _told(TRAINING, trained_per_s(learnt, bench.args.questions * GROUP))


def _told(name: str, speed: float) -> float:
    sys.stderr.write(f"{name}: {speed:.0f} tokens/s\n")
    return speed


def bound(generation: float, training: float, trainer: str) -> float:
    """Tokens a second that no schedule can exceed; see the module's docstring."""
    if trainer == "given":
        return min(generation, training)
    return 1 / (1 / generation + 0.5 / training)  # training alone keeps one of two cores busy


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trainer", choices=("given", "real"), default="given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--questions", type=int, default=16, help="a step")
    parser.add_argument("--rows", type=int, default=8, help="that a server decodes at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args)
        try:
            rounds = [measure(bench, i) for i in range(args.rounds)]
        finally:
            bench.trials.end_all()
    print_table(rounds)


def print_table(rounds: Sequence[Round]) -> None:
    """Medians, and in brackets each round's."""
    columns = (
        ("tokens/s", ",.0f", lambda r, name: r.reached[name]),
        ("times turns", ".2f", lambda r, name: r.reached[name] / r.reached["turns"]),
        ("of the bound", ".0%", lambda r, name: r.reached[name] / r.bounds[name]),
    )
    titles = " | ".join(title for title, _, _ in columns)
    sys.stdout.write(f"| | {titles} |\n|---|---|---|---|\n")
    for name in SCHEDULES:
        cells = []
        for _, form, value in columns:
            values = [value(r, name) for r in rounds]
            each = ", ".join(format(v, form) for v in values)
            cells.append(f"{statistics.median(values):{form}} ({each})")
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
