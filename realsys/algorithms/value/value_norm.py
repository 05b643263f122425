"""Running mean and variance of the returns, so that the critic learns numbers near 0 ± 1.

(PopArt without weight correction: van Hasselt et al., arXiv:1602.07714; as used in MAPPO,
arXiv:2103.01955.) The critic predicts normalised values: denormalise them before GAE; update
these moments with the new returns, then normalise the returns into targets. The moments are part
of the model: save and load them with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from realsys.algorithms.advantage.advantages import Reduce, differences, masked_sums
from realsys.api.errors import CheckpointError, ConfigError


class RunningMoments:
    """Mean and variance of everything seen, in float64 whatever the tensors are.

    Args:
        beta: share of the old moments kept at each update, e.g. 0.99995, with the bias towards
            the start removed as in Adam. None: every element ever seen counts alike.
        eps: the variance is taken as at least this.
    """

    def __init__(self, *, beta: float | None = None, eps: float = 1e-5) -> None:
        if beta is not None and not 0 < beta < 1:
            raise ConfigError(
                f"beta is {beta}", where="RunningMoments", fix="use 0 < beta < 1, or none"
            )
        if not eps > 0:
            raise ConfigError(f"eps is {eps}", where="RunningMoments", fix="use a number above 0")
        self.beta, self.eps = beta, eps
        self._weight = self._first = self._second = 0.0  # of 1, x and x²

    @property
    def mean(self) -> float:
        """0 before the first update."""
        return self._first / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        """At least sqrt(eps); 1 before the first update."""
        if not self._weight:
            return 1.0
        return math.sqrt(max(self._second / self._weight - self.mean**2, self.eps))

    def update(self, x: torch.Tensor, mask: torch.Tensor, *, reduce: Reduce | None = None) -> None:
        """Takes in the elements of ``x`` where ``mask``; no change if there are none.

        Args:
            reduce: sums a float64 ``[3]`` tensor over the data-parallel ranks (all of them call
                it), so that all keep the same moments.
        """
        count, first, second = masked_sums(x, mask, reduce)
        if not count:
            return
        keep, share = (1.0, 1.0) if self.beta is None else (self.beta, (1.0 - self.beta) / count)
        self._weight = keep * self._weight + share * count
        self._first = keep * self._first + share * first
        self._second = keep * self._second + share * second

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """float32 (x - mean) / std."""
        return (differences(x, self.mean) / self.std).float()

    def denormalise(self, x: torch.Tensor) -> torch.Tensor:
        """float32 x · std + mean."""
        return (x.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, float]:
        """Plain numbers that restore the moments exactly."""
        return {"weight": self._weight, "first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes back what ``state_dict`` gave."""
        if set(state) != {"weight", "first", "second"}:
            raise CheckpointError(
                f"found {sorted(state)}, need first, second, weight",
                where="RunningMoments",
                fix="resume with the value normalisation that wrote the checkpoint",
            )
        self._weight, self._first, self._second = (
            float(state[name]) for name in ("weight", "first", "second")
        )
