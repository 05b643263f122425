"""Measures what the guard of reward rules costs an answer: `python benchmarks/bench_guarded_rules.py`.

Rows: a rule of some 10 µs in the worker itself (``trusted``) and in the guard; ``math_verify`` on answers
that are plain numbers, on answers that need its library, and on both; a rule that calls ``math_verify``.
Wall-clock time and computing time of all processes, for an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from realsys.api import registry
from realsys.api.basics.reward import Completion, Score
from realsys.rewards.rule import RewardRule

RULES = """
from realsys.api.registry import register_reward

def steps(response):
    return min(sum(line.count("=") for line in response.splitlines() * 8), 2) / 2

register_reward("steps", steps)
register_reward("steps_trusted", steps, trusted=True)
"""
WORKED = """
from realsys.api.registry import register_reward
from realsys.rewards.math_verify import math_verify_reward

def worked(response, answer):
    return 0.9 * math_verify_reward(response=response, answer=answer) + 0.1 * ("=" in response)

register_reward("worked", worked)
"""
Values = Callable[[int, int, int], tuple[str, str]]
LIBRARY: Sequence[Values] = (
    lambda a, b, c: (rf"{a}\pi+{b}", rf"{b}+\pi\cdot {a}"),
    lambda a, b, c: (rf"{a}-\sqrt{{{b}}}", rf"{a}+\sqrt{{{b}}}"),
    lambda a, b, c: (rf"({a}\sqrt{{{b}}}, {c})", rf"(\sqrt{{{b}}}\cdot {a},{c})"),
    lambda a, b, c: (rf"\sin({a}x)+{b}", rf"{b}+\sin({a}x)"),
)


def library_answers(number: int, rng: random.Random) -> list[Completion]:
    """Returns answers whose values are no plain numbers."""
    made = []
    for i in range(number):
        known, found = LIBRARY[i % len(LIBRARY)](*(rng.randint(2, 97) for _ in range(3)))
        made.append(Completion(response=f"so we get \\boxed{{{found}}}", answer=known))
    return made


def plain_answers(number: int, rng: random.Random) -> list[Completion]:
    """Returns answers whose values are whole numbers."""
    values = [rng.randint(2, 10**6) for _ in range(number)]
    return [Completion(response=f"so it is {v}\n#### {v}", answer=str(v)) for v in values]


def cpu_s(pid: int) -> float:
    """Returns the computing time of a process, of those that it waited for, and of its living children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:  # it ended meanwhile: its parent has its time
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_s, children))


def measured(name: str, answers: Sequence[Completion]) -> dict[str, float]:
    """Scores the answers by a rule that is warm; returns milliseconds for each."""
    rule = RewardRule(name)
    rule.score_all(answers[: len(LIBRARY)])
    cpu, wall = cpu_s(os.getpid()), time.perf_counter()
    found = rule.score_all(answers)
    wall, cpu = time.perf_counter() - wall, cpu_s(os.getpid()) - cpu
    assert all(isinstance(result, Score) for result in found), found
    return {"wall_ms": wall / len(answers) * 1e3, "cpu_ms": cpu / len(answers) * 1e3}


def main() -> int:
    """Prints a table, and with --json the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=480)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("steps_rules", RULES), ("worked_rules", WORKED)):
            file = Path(folder, f"{name}.py")
            file.write_text(text)
            registry.load_plugins([str(file)])
        plain = plain_answers(options.answers, rng)
        library = library_answers(options.answers, rng)
        mix = [answer for pair in zip(plain, library, strict=True) for answer in pair]
        rows = {
            "10 µs, trusted": measured("steps_trusted", plain),
            "10 µs, guarded": measured("steps", plain),
            "math_verify, numbers": measured("math_verify", plain),
            "math_verify, library": measured("math_verify", library),
            "math_verify, half and half": measured("math_verify", mix),
            "calls math_verify, library": measured("worked", library),
        }
    if options.json:
        sys.stdout.write(json.dumps({"cores": len(os.sched_getaffinity(0)), "rows": rows}) + "\n")
        return 0
    sys.stdout.write(f"{'rule and answers':28} {'wall ms':>9} {'CPU ms':>9}\n")
    for name, row in rows.items():
        sys.stdout.write(f"{name:28} {row['wall_ms']:9.3f} {row['cpu_ms']:9.3f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
