"""Lengths of answers with a heavy tail: a lognormal, cut at the most tokens an answer may have (pure).

Cut means that longer ones end there, as generation does: a few in a thousand have exactly the maximum.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from realsys.api.errors import ConfigError

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Answers of ``mean`` tokens on average, ``longest`` at most.

    ``spread`` is the standard deviation of the logarithm before the cut: 0 makes all alike, 1 is a tail as
    reasoning models have it.
    """

    mean: float
    longest: int
    spread: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.longest or self.spread < 0:
            raise ConfigError(
                f"answers of {self.mean} tokens on average, {self.longest} at most, "
                f"spread {self.spread}",
                where="lengths",
                fix="1 <= mean <= longest and spread >= 0",
            )

    def draw(self, random_: random.Random) -> int:
        """The length of one answer, at least 1."""
        if self.spread == 0:
            return round(self.mean)
        drawn = random_.lognormvariate(self.centre, self.spread)
        return max(1, min(self.longest, round(drawn)))

    @property
    def centre(self) -> float:
        """Mean of the logarithm before the cut, such that the mean after it is ``mean``."""
        return _centre(self.mean, self.longest, self.spread)


@lru_cache(maxsize=64)
def _centre(mean: float, longest: int, spread: float) -> float:
    low, high = math.log(mean) - 20.0, math.log(longest) + 20.0
    for _ in range(80):
        middle = (low + high) / 2
        if _mean_after_cut(middle, longest, spread) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean_after_cut(centre: float, longest: int, spread: float) -> float:
    """E[min(X, longest)] of a lognormal X."""
    at = (math.log(longest) - centre) / spread
    below = math.exp(centre + spread**2 / 2) * _NORMAL.cdf(at - spread)
    return below + longest * (1 - _NORMAL.cdf(at))
