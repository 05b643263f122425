"""The decision code against thousands of faults; and that breaking any rule of it is noticed.

A failing seed is printed with the command that shows its trace. How many are played here is a matter of
time; ``python -m tests.simulation.run --seeds 0-99999`` plays as many as one likes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from simulation.run import Outcome, play
from simulation.trial import Rules

from realsys.name_resolve.lease_judge import LeaseJudge
from realsys.supervisor.failure_detector import FailureDetector

pytestmark = pytest.mark.simulation
ROOT = Path(__file__).parents[2]
NUM_SEEDS, BATCH = 1000, 250
RULES = Rules()


def told(outcome: Outcome) -> str:
    lines = [f"see: python -m tests.simulation.run --seed {outcome.seed}", *outcome.violations]
    return "\n  ".join(lines)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    bad = [o for o in map(play, range(first, first + BATCH)) if o.violations]
    assert not bad, "\n".join(map(told, bad))


class DecidesAtOnce(FailureDetector):
    """Trusts every answer, and takes none for an answer that nobody is there."""

    def look(self, present, *, now_s, leases=None):
        return super().look(present or {}, now_s=now_s)

    def _freeze(self, why, now_s):
        pass


class ComesBack(LeaseJudge):
    """Takes a new lease however long it was silent."""

    def gone(self, now_s):
        return True


# A rule, broken; what is said then; seeds that show it. They change with the schedules: then look for
# others by playing seeds 0-1999 (chains are those that end with 3).
BROKEN = {
    "a checkpoint without fence": (
        replace(RULES, fenced=RULES.fenced - {"checkpoint"}),
        "checkpoint .* was accepted .* after took_attempt",
        (83, 153, 173),
    ),
    "no fence at all, and suspended workers publish": (
        replace(RULES, fenced=frozenset(), waits_while_suspended=False),
        "was accepted .* after took_attempt",
        (15, 46, 83),
    ),
    "a detector that decides at once": (
        replace(RULES, detector=DecidesAtOnce),
        "declared lost .* and nothing was wrong",
        (10, 30, 40),
    ),
    "a judge that lets come back": (
        replace(RULES, judge=ComesBack),
        "took its key anew at .* after the store last heard of it",
        (28, 54, 55),
    ),
    "a judge that is not asked again": (
        replace(RULES, asks_judge_again=False),
        "took its key anew at .* after the store last heard of it",
        (444, 479, 598),
    ),
    "no rule of lineage": (
        replace(RULES, is_dead=lambda attempt, step, resumed: False),
        "two writers|living rows of step",
        (5, 9, 17),
    ),
    "resumed is not fenced": (
        replace(RULES, fenced=RULES.fenced - {"resumed"}),
        "0 living rows of step",
        (193, 673, 953),
    ),
    "older attempts are cleared without fence": (
        replace(RULES, fenced=RULES.fenced - {"clear"}),
        "declared lost .* and nothing was wrong",
        (1044,),
    ),
    "a worker leaves without fence": (
        replace(RULES, fenced=RULES.fenced - {"leave"}),
        "declared lost .* and nothing was wrong",
        (196, 634, 853),
    ),
    "a checkpoint's folder is its step": (
        replace(RULES, folder_per_attempt=False),
        "the checkpoint of step .* is gone",
        (179, 304, 414),
    ),
    "metrics are cut back in place": (
        replace(RULES, truncates_metrics=True),
        "0 living rows of step",
        (133, 143, 173),
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(rule: str) -> None:
    rules, said, seeds = BROKEN[rule]
    found = [violation for seed in seeds for violation in play(seed, rules).violations]
    assert [violation for violation in found if re.search(said, violation)], found
    assert not any(play(seed).violations for seed in seeds)  # and the rule is what prevents it


def test_the_supervisor_must_know_of_leases_taken_anew() -> None:
    class LooksAtNamesOnly(FailureDetector):
        def look(self, present, *, now_s, leases=None):
            return super().look(present, now_s=now_s)

    (found,) = play(798, replace(RULES, detector=LooksAtNamesOnly)).violations
    assert re.search("model_worker/0 .* was declared lost .* nothing was wrong", found)


def test_a_seed_is_a_schedule() -> None:
    command = [sys.executable, "-m", "tests.simulation.run", "--seed", "44"]
    traces = [
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert "took_attempt" in traces[0]
