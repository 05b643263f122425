"""Trials whose steps take their time, until the test lets them hurry: they sleep, they do not compute.

A run that a test is to stop, kill or attack in its middle needs time, not steps. See also
``real_trials.LONG_PPO``, whose pace is fixed.
"""

from __future__ import annotations

from pathlib import Path

RULE = """
import time
from pathlib import Path
from realsys.api.registry import register_reward
from realsys.rewards.math_verify import math_verify_reward

def paced(response, answer):
    time.sleep(float(Path({seconds!r}).read_text()))
    return math_verify_reward(response=response, answer=answer)

register_reward("paced", paced, trusted=True)
"""


class Pace:
    """How long a trial's steps take at least.

    Args:
        folder: for the rule and its file; it is there.
        step_s: at first.
        sequences: of a step, each of which waits for the rule.
    """

    def __init__(self, folder: Path, step_s: float, *, sequences: int = 16) -> None:
        self._seconds = folder / "pace"
        self._rule = folder / "paced_rule.py"
        self._sequences = sequences
        self.set(step_s)
        self._rule.write_text(RULE.format(seconds=str(self._seconds)))

    @property
    def words(self) -> tuple[str, ...]:
        """Of a launch. A run with the same words and another pace has the same numbers."""
        return ("--import", str(self._rule), "task.reward=paced")

    def set(self, step_s: float) -> None:
        """From the next answer on."""
        new = self._seconds.with_suffix(".new")
        new.write_text(str(step_s / self._sequences))
        new.replace(self._seconds)
