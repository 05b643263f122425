"""Heavy-tailed answer lengths: a lognormal, truncated at the maximum answer length (pure).

Longer answers end at the maximum, as in generation: a few in a thousand have exactly that length.
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
    """Distribution of answer lengths with mean ``mean`` and maximum ``longest``.

    ``spread`` is the standard deviation of the logarithm before truncation: 0 makes all equal, 1 is a tail
    like that of reasoning models.
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
        """Draws the length of one answer, at least 1."""
        if self.spread == 0:
            return round(self.mean)
        drawn = random_.lognormvariate(self.centre, self.spread)
        return max(1, min(self.longest, round(drawn)))

    @property
    def centre(self) -> float:
        """Mean of the logarithm before truncation for which the mean after it is ``mean``."""
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
