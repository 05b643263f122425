"""Scores answers by a reward model, and weighs its score with the rule's."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from realsys.api.basics.reward import PARTS
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, one_per_sequence
from realsys.interfaces.interface_arguments import RewardModelArguments
from realsys.interfaces.preferences.preference_training import last_values


@dataclass(frozen=True, kw_only=True)
class RewardModelInterface(RewardModelArguments, ModelInterface):
    """Interface of a frozen sequence classifier with one label; it reads the policy's tokens."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Computes float32 ``rewards``, one a sequence, from its tokens and the rule's ``rewards``; both
        parts, named ``model`` and ``rule``, go into ``metadata["reward_parts"]``.

        Rewards are NaN where the rule's are: those answers are set aside.
        """
        values = model.module.forward(data.select([INPUT]), mb_spec=mb_spec).float()
        score_S = last_values(values, data, skips=model.score_skips)
        rule_S = data.data["rewards"].float().to(score_S.device)
        rewards_S = self.rule_weight * rule_S + self.weight * self._clipped(score_S)
        return SequenceSample.from_tensors(
            data.ids,
            {"rewards": one_per_sequence(data)},
            {"rewards": rewards_S},
            metadata={PARTS: _parts(data, score_S, rule_S)},
        )

    def _clipped(self, score_S: torch.Tensor) -> torch.Tensor:
        return score_S if self.clip is None else score_S.clamp(-self.clip, self.clip)


def _parts(data: SequenceSample, score_S: torch.Tensor, rule_S: torch.Tensor) -> list[str]:
    """JSON of each id's answers; the rule's part is left out where it gave no number."""
    found = [
        {"model": score, **({"rule": rule} if rule == rule else {})}
        for score, rule in zip(score_S.tolist(), rule_S.tolist(), strict=True)
    ]
    rows = iter(found)
    return [json.dumps([next(rows) for _ in pieces]) for pieces in data.meta.seqlens[INPUT]]
