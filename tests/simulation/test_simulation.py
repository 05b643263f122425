"""The decision code against thousands of faults; and that breaking any rule of it is noticed.

A failing seed is printed with the command that shows its trace. How many are played here is a matter of
time; ``python -m tests.simulation.run --seeds 0-99999`` plays as many as one likes.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from simulation.run import Outcome, command, play
from simulation.trial import Rules

from realsys.supervisor.health.failure_detector import FailureDetector
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed

pytestmark = pytest.mark.simulation
ROOT = Path(__file__).parents[2]
NUM_SEEDS, BATCH = 1000, 250
RULES = Rules()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of leases expire, and each says so."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def told(outcome: Outcome) -> str:
    lines = [f"see: {command(outcome.seed, RULES)}", *outcome.violations]
    return "\n  ".join(lines)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    played = [play(seed, RULES) for seed in range(first, first + BATCH)]
    bad = [outcome for outcome in played if outcome.violations]
    assert not bad, "\n".join(map(told, bad))


class DecidesAtOnce(FailureDetector):
    """Trusts every answer, and takes none for an answer that nobody is there."""

    def look(self, present, *, now_s, leases=None):
        return super().look(present or {}, now_s=now_s)

    def _freeze(self, why, now_s):
        pass


def by_numbers(told: dict[int, Resumed]) -> Lineage:
    """Every later attempt ends what came before, also one that wakes up late and that nobody went on
    from."""
    limits = {n: min((told[m].step for m in told if m > n), default=None) for n in told}
    return Lineage(limits)


def without(*writes: str) -> Rules:
    return replace(RULES, fenced=RULES.fenced - set(writes))


# A rule, broken; what is said then; seeds that show it. They change with the schedules: then look for
# others by playing seeds 0-1999 (chains are those that end with 3).
BROKEN = {
    "a checkpoint without fence": (
        without("checkpoint"),
        "checkpoint .* was accepted .* after took_attempt",
        (163, 248, 703),
    ),
    "no fence at all, and suspended workers publish": (
        replace(RULES, fenced=frozenset(), waits_while_suspended=False),
        "was accepted .* after took_attempt",
        (123,),
    ),
    "attempts with stores of their own do not look at the folders": (
        replace(RULES, looks_at_folders=False),
        "was accepted .* after took_attempt",
        (33, 38, 75),
    ),
    "a detector that decides at once": (
        replace(RULES, detector=DecidesAtOnce),
        "declared lost .* and nothing was wrong",
        (8, 10),
    ),
    "a lease is taken anew without fence": (
        without("take"),
        "registered of .* was accepted .* but attempt",
        (2, 12, 22),
    ),
    "the end of an attempt is not told": (
        replace(RULES, ends_attempts=False),
        "was accepted .* but attempt . was ended",
        (32, 33),
    ),
    "no rule of lineage": (
        replace(RULES, lineage=lambda told: Lineage({})),
        "which does not count there|rows of step",
        (973,),
    ),
    "a lineage of numbers, without from whose checkpoint": (
        replace(RULES, lineage=by_numbers),
        "which does not count there|rows of step",
        (15, 29),
    ),
    "older attempts are cleared without fence": (
        without("clear"),
        "declared lost .* and nothing was wrong",
        (139, 144, 685),
    ),
    "a worker leaves without fence": (
        without("leave"),
        "declared lost .* and nothing was wrong",
        (265,),
    ),
    "a checkpoint's folder is its step": (
        replace(RULES, folder_per_attempt=False),
        "the checkpoint of step .* is gone",
        (179, 205),
    ),
    "checkpoints of newer attempts are tidied up": (
        replace(RULES, prunes_newer=True),
        "the checkpoint of step .* is gone",
        (179, 205),
    ),
    "a checkpoint to go on from is not adopted": (
        replace(RULES, adopts=False, keep=1),
        "the checkpoint of step .* is gone",
        (563, 613, 1443),
    ),
    "it is said before the checkpoint is adopted": (
        replace(RULES, says_first=True, keep=1),
        "the checkpoint of step .* is gone",
        (313, 933, 1403),
    ),
    "names are pointed back to older rows": (
        replace(RULES, names_only_go_on=False),
        "the metrics shown are those of attempt",
        (33, 276, 313),
    ),
    "a supervisor without patience": (
        replace(RULES, patience_s=5.0),
        "one short outage alone: 2 attempts",
        (6510,),
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(rule: str) -> None:
    rules, said, seeds = BROKEN[rule]
    found = [violation for seed in seeds for violation in play(seed, rules).violations]
    assert [violation for violation in found if re.search(said, violation)], found
    whole = replace(RULES, keep=rules.keep)
    assert not any(play(seed, whole).violations for seed in seeds)  # the rule is what prevents it


def test_a_seed_is_a_schedule() -> None:
    argv = [sys.executable, "-m", "tests.simulation.run", "--seed", "44"]
    traces = [
        subprocess.run(
            argv,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=140,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert "took_attempt" in traces[0]
