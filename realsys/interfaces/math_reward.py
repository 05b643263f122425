"""Scores answers by registered reward rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from realsys.api.basics.reward import MEAN_REWARD, PARTS, Score, with_thoughts
from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import one_per_sequence
from realsys.interfaces.completions import answered_records
from realsys.interfaces.interface_arguments import MathRewardArguments
from realsys.rewards.rule import rule_of
from realsys.rewards.scores import NO_SCORE
from realsys.rewards.set_aside import SetAsideRecords


@dataclass(frozen=True, kw_only=True)
class MathRewardInterface(MathRewardArguments, ModelInterface):
    """Computes ``rewards`` in ``inference``; needs a tokenizer, no module.

    A truncated answer is scored by the text it has; the policy decides whether that score counts
    (``score_on_truncated``).
    """

    set_aside: SetAsideRecords = field(init=False, repr=False, default_factory=SetAsideRecords)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Computes float32 ``rewards``, one per sequence; named parts of the scores go into
        ``metadata["reward_parts"]``, with ``report_means`` each record's mean into ``["mean_reward"]``.

        Rewards are NaN for all answers to a record for which the rule gave no number twice.

        Raises:
            RewardError: there are too many such records.
        """
        rule = rule_of(self.reward, self.reward_args)
        records = answered_records(data, model.tokenizer, rule.fields, asked=data)
        given = [
            scores and list(map(with_thoughts, scores, record.answers))
            for record, scores in zip(records, self.set_aside.scores(rule, records), strict=True)
        ]
        values: list[float] = []
        for record, scores in zip(records, given, strict=True):
            if scores is None:
                values += [NO_SCORE] * len(record.answers)
            else:
                values += [score.value for score in scores]
        return SequenceSample.from_tensors(
            data.ids,
            {"rewards": one_per_sequence(data)},
            {"rewards": torch.tensor(values, dtype=torch.float32)},
            metadata={**(_means(given) if self.report_means else {}), **_parts(given)},
        )


def _means(given: Sequence[list[Score] | None]) -> dict[str, list[float | None]]:
    """The mean of each record's scores, None where there is no score."""
    return {MEAN_REWARD: [fmean(s.value for s in scores) if scores else None for scores in given]}


def _parts(given: Sequence[list[Score] | None]) -> dict[str, list[str]]:
    """The parts of each record's scores, as JSON; nothing if no rule names any."""
    if not any(score.parts for scores in given for score in scores or ()):
        return {}
    return {PARTS: [json.dumps([dict(s.parts) for s in scores or ()]) for scores in given]}
