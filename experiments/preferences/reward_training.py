"""Training of a reward model on preference pairs. ``reward-model``.

Starts from a language model's directory, or a classifier's, and saves a directory that
``reward_model.path`` of a later run takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.parts.question_files import absolute
from experiments.preferences.pair_training import PairTraining
from realsys.api.model import ModelAbstraction, ModelInterfaceAbstraction
from realsys.api.options import option


@dataclass(frozen=True, kw_only=True)
class RewardTraining(PairTraining):
    """Reward model from preference pairs (Bradley-Terry)."""

    centering: float = option(
        0.01, "weight of (chosen + rejected)², which keeps scores around 0 (arXiv:2312.09244)", ge=0
    )

    call = "reward_train"
    keys = ("packed_input_ids",)

    def interface(self) -> ModelInterfaceAbstraction:
        """The interface that trains and evaluates."""
        return ModelInterfaceAbstraction("preference", {"centering": self.centering})

    def start(self, dtype: str) -> ModelAbstraction:
        """The starting model, with a new head if it has none."""
        return ModelAbstraction(
            "hf_critic", {"path": absolute(self.model.path) or "", "dtype": dtype}
        )


def reward_model() -> RewardTraining:
    """Reward model from preference pairs; its product is a ``reward_model.path``."""
    return RewardTraining()
