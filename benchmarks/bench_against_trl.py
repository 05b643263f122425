"""Compares a whole GRPO step, rollout and update, with trl in the same run.

    python -m venv TRL && TRL/bin/pip install torch==2.13.0
    TRL/bin/pip install torch==2.13.0 trl==1.16.0
    python benchmarks/bench_against_trl.py --trl TRL/bin/python [--parts even tailed] [--rounds 3]

64 questions with 4 answers each, a Llama of width 128 with 4 layers, one optimizer step a batch, no
reference: the same policy, questions, reward and settings on both sides, which take turns. *even*: 32
tokens an answer. *tailed*: geometric lengths with a mean of 32 and at most 256 tokens. ``realsys`` is
launched as a user does (``grpo-math``): once with one model worker of two threads, once with two of
one; trl gets two threads. Seconds from the end of a trial's second step to the end of its last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]

from real_trials import Trials, explain  # noqa: E402
from uniform_policy import grpo_words, make_policy, make_questions  # noqa: E402

from realsys.observability.events import StepEvent, read_events  # noqa: E402
from realsys.trial.trial_state import State  # noqa: E402

PROMPTS, GROUP = 64, 4


@dataclass(frozen=True)
class Part:
    """Lengths of answers."""

    shortest: int
    longest: int


PARTS = {"even": Part(32, 32), "tailed": Part(0, 256)}
WORKERS = {
    "1 worker, 2 threads": ("scheduling.model_worker.cpu=2",),
    "2 workers, 1 thread each": (
        "scheduling.model_worker.cpu=1",
        "actor.parallel=d2",
        "placement.n_model_workers=2",
    ),
}


def per_step_s(ends: list[float]) -> float:
    """Seconds a step, from the second to the last."""
    return (ends[-1] - ends[1]) / (len(ends) - 2)


@dataclass
class Bench:
    """Policy and questions in ``folder``, trials beside them."""

    folder: Path
    trl: Path
    steps: int

    def __post_init__(self) -> None:
        self.policy = make_policy(self.folder / "policy")
        self.questions = make_questions(self.folder / "questions.jsonl", PROMPTS * self.steps)
        self.trials = Trials(self.folder / "trials")

    def by_trl(self, part: Part) -> float:
        """Seconds a step."""
        words = {
            "steps": self.steps,
            "prompts": PROMPTS,
            "group": GROUP,
            "longest": part.longest,
            "shortest": part.shortest,
        }
        command = [str(self.trl), str(HERE / "trl_grpo.py"), str(self.policy), str(self.questions)]
        done = subprocess.run(
            [*command, *(f"--{k}={v}" for k, v in words.items())],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr)
        return per_step_s(json.loads(done.stdout.splitlines()[-1]))

    def by_realsys(self, name: str, part: Part, words: tuple[str, ...]) -> float:
        """The same of a trial."""
        files = self.trials.launch(
            "grpo-math",
            name,
            *grpo_words(
                self.policy, self.questions, batch=PROMPTS, group=GROUP, longest=part.longest
            ),
            f"gen.min_new_tokens={part.shortest}",
            *words,
        )
        view = self.trials.wait(files, timeout_s=900, every_s=2)
        if view.state is not State.COMPLETED:
            sys.exit(explain(files, view))
        events = read_events(files.phase(files.root).events)
        return per_step_s([e.end for e in events if isinstance(e, StepEvent)])


def main() -> None:
    """A table: seconds a step, and how many steps of ours fit in one of trl."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", type=Path, required=True, help="Python of trl's environment")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    sys.stdout.write(
        "| answers | | s a step: best | median | times trl: best | median of rounds |\n"
    )
    sys.stdout.write("|---|---|---:|---:|---:|---:|\n")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.trl, args.steps)
        try:
            for part in args.parts:
                took: dict[str, list[float]] = {}
                for i in range(args.rounds):
                    took.setdefault("trl", []).append(bench.by_trl(PARTS[part]))
                    for j, (name, words) in enumerate(WORKERS.items()):
                        s = bench.by_realsys(f"{part}-{i}-{j}", PARTS[part], words)
                        took.setdefault(name, []).append(s)
                for name, seconds in took.items():
                    ratios = [b / a for a, b in zip(seconds, took["trl"], strict=True)]
                    sys.stdout.write(
                        f"| {part} | {name} | {min(seconds):.3f} | {statistics.median(seconds):.3f} "
                        f"| {min(took['trl']) / min(seconds):.2f} | {statistics.median(ratios):.2f} |\n"
                    )
                    sys.stdout.flush()
        finally:
            bench.trials.end_all()


if __name__ == "__main__":
    main()
