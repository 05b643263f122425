"""Scores answers by a registered rule that compares their text with the known answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError
from realsys.api.model import Model, ModelInterface
from realsys.api.registry import find_reward
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, answer_texts, one_per_sequence


@dataclass(frozen=True, kw_only=True)
class MathRewardInterface(ModelInterface):
    """``inference`` gives ``rewards``; needs a tokenizer, no module.

    An answer that was cut off is scored by the text it has: whether that score counts is the
    policy's business (``score_on_truncated``).
    """

    reward: str = "math_verify"

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """float32 ``rewards``, one per sequence, from the text and ``metadata["answer"]``."""
        rule = find_reward(self.reward)
        known = known_answers(data)
        groups = data.meta.seqlens[INPUT]
        answer_of_sequence = [a for a, pieces in zip(known, groups, strict=True) for _ in pieces]
        scores = [
            float(rule(response=text, answer=answer))
            for text, answer in zip(
                answer_texts(data, model.tokenizer), answer_of_sequence, strict=True
            )
        ]
        return SequenceSample.from_tensors(
            data.ids,
            {"rewards": one_per_sequence(data)},
            {"rewards": torch.tensor(scores, dtype=torch.float32)},
        )


def known_answers(data: SequenceSample) -> list[str]:
    """The final answer of each id.

    Raises:
        DataError: the data set gave none.
    """
    if "answer" not in data.meta.metadata:
        raise DataError(
            "no known answers to compare with",
            where=f"metadata of the batch: {sorted(data.meta.metadata)}",
            fix='use a data set that gives metadata["answer"], e.g. math_prompts',
        )
    return [str(answer) for answer in data.meta.metadata["answer"]]
