"""The weight of the entropy bonus: constant, or steered towards a target."""

from __future__ import annotations

import math
from collections.abc import Mapping

from realsys.api.errors import CheckpointError


class EntropyControl:
    """Moves the weight by ``step`` after each batch: up where the entropy is below its target, else down,
    never below 0; above the target there is no bonus (Skywork-OR1, He et al., arXiv:2505.22312, sec. 4.2).

    Args:
        coef: to begin with.
        target: mean entropy of a token, in nats; None: the weight stays ``coef``.
    """

    def __init__(self, coef: float, *, target: float | None, step: float) -> None:
        self._coef, self._target, self._step = coef, target, step
        self._above = False  # nothing is known before the first batch

    @property
    def coef(self) -> float:
        """The weight to use on the next batch."""
        return 0.0 if self._above else self._coef

    def update(self, entropy: float) -> None:
        """Takes in a batch's mean entropy of a token, over all ranks; once a batch, on all of them."""
        if self._target is None or not math.isfinite(entropy):
            return
        self._above = entropy > self._target
        self._coef = max(self._coef + (-self._step if self._above else self._step), 0.0)

    def state_dict(self) -> dict[str, float]:
        """What the batches made of it; nothing where the weight is constant."""
        if self._target is None:
            return {}
        return {"coef": self._coef, "above": float(self._above)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes back what ``state_dict`` gave; a constant weight is that of the settings."""
        if self._target is None or not state:
            return
        if set(state) != {"coef", "above"} or not math.isfinite(state["coef"]):
            raise CheckpointError(
                f"found {dict(state)}, need above and a finite coef",
                where="EntropyControl",
                fix="resume from another checkpoint",
            )
        self._coef, self._above = float(state["coef"]), bool(state["above"])
