"""Statistics of updates of which some optimizer steps were left out, as their gradient was not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from realsys.api.model import SKIPPED_STEPS


def without_skipped(stats: Mapping[str, float]) -> dict[str, float]:
    """Returns the statistics of one optimizer step; of one that was left out, those that are finite."""
    if SKIPPED_STEPS not in stats:
        return dict(stats)
    return {name: value for name, value in stats.items() if math.isfinite(value)}


def made_and_skipped(
    done: Sequence[dict[str, float]],
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Returns the statistics of the optimizer steps that were made, and how many were left out, if any."""
    made = [stats for stats in done if SKIPPED_STEPS not in stats]
    skipped = len(done) - len(made)
    return made, {SKIPPED_STEPS: float(skipped)} if skipped else {}
