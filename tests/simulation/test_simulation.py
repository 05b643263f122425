"""The decision code against thousands of faults; and that breaking any rule of it is noticed.

A failing seed is printed with the command that shows its trace. How many are played here is a matter of
time; ``python -m tests.simulation.run --seeds 0-99999`` plays as many as one likes.
"""

from __future__ import annotations

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

    def look(self, present, *, now_s):
        return super().look(present or {}, now_s=now_s)

    def _freeze(self, why, now_s):
        pass


class ComesBack(LeaseJudge):
    """Takes a new lease however long it was silent."""

    def gone(self, now_s):
        return True


# A rule, broken; a seed that shows it (and a few more, should the schedules change); what is said.
BROKEN = {
    "a checkpoint without fence": (
        replace(RULES, fenced=RULES.fenced - {"checkpoint"}),
        "checkpoint .* was accepted .* after took_attempt",
    ),
    "no fence at all, and suspended workers publish": (
        replace(RULES, fenced=frozenset(), waits_while_suspended=False),
        "was accepted .* after took_attempt",
    ),
    "a detector that decides at once": (
        replace(RULES, detector=DecidesAtOnce),
        "declared lost .* and nothing was wrong",
    ),
    "a judge that lets come back": (
        replace(RULES, judge=ComesBack),
        "took its key anew at .* after the store last heard of it",
    ),
    "a judge that is not asked again": (
        replace(RULES, asks_judge_again=False),
        "took its key anew at .* after the store last heard of it",
    ),
    "no rule of lineage": (
        replace(RULES, is_dead=lambda attempt, step, resumed: False),
        "two writers|living rows of step",
    ),
    "resumed is not fenced": (
        replace(RULES, fenced=RULES.fenced - {"resumed"}),
        "0 living rows of step",
    ),
    "older attempts are cleared without fence": (
        replace(RULES, fenced=RULES.fenced - {"clear"}),
        "declared lost .* and nothing was wrong",
    ),
    "a worker leaves without fence": (
        replace(RULES, fenced=RULES.fenced - {"leave"}),
        "declared lost .* and nothing was wrong",
    ),
    "a checkpoint's folder is its step": (
        replace(RULES, folder_per_attempt=False),
        "the checkpoint of step .* is gone",
    ),
    "metrics are cut back in place": (
        replace(RULES, truncates_metrics=True),
        "0 living rows of step",
    ),
}
