"""Scores answers by a registered rule that compares their text with the known answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import DataError
from realsys.api.model import Model, ModelInterface
from realsys.api.registry import find_reward
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.answers import INPUT, PROMPT_MASK, answer_texts, one_per_sequence
from realsys.interfaces.interface_arguments import MathRewardArguments
from realsys.rewards.scores import NO_SCORE, SetAsideRecords, score


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
        """Computes float32 ``rewards``, one per sequence, from the text and ``metadata["answer"]``.

        They are NaN for all answers to a record for which the rule gave no number twice.

        Raises:
            RewardError: there are too many such records.
        """
        call = partial(score, self.reward, find_reward(self.reward))
        texts = answer_texts(data, model.tokenizer)  # record by record
        groups = data.meta.seqlens[INPUT]
        scores: list[float] = []
        for number, (id_, known) in enumerate(zip(data.ids, known_answers(data), strict=True)):
            self.set_aside.num_records += 1
            given = [
                self.set_aside.score_with_retry(
                    partial(call, response=text, answer=known),
                    id=id_,
                    prompt=partial(_prompt, data, number, model.tokenizer),
                )
                for _, text in zip(groups[number], texts, strict=False)
            ]
            scores += [NO_SCORE] * len(given) if id_ in self.set_aside.ids else given
        return SequenceSample.from_tensors(
            data.ids,
            {"rewards": one_per_sequence(data)},
            {"rewards": torch.tensor(scores, dtype=torch.float32)},
        )


def _prompt(data: SequenceSample, number: int, tokenizer: Any) -> str:
    """Decodes the question of the record ``number``."""
    record = data.take([number])
    first = record.piece_lengths(INPUT)[0]
    tokens, mask = record.data[INPUT][:first], record.data[PROMPT_MASK][:first]
    return str(tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True))


def known_answers(data: SequenceSample) -> list[str]:
    """Returns the final answer of each id.

    Raises:
        DataError: the data set has no answers.
    """
    if "answer" not in data.meta.metadata:
        raise DataError(
            "no known answers to compare with",
            where=f"metadata of the batch: {sorted(data.meta.metadata)}",
            fix='use a data set that sets metadata["answer"], e.g. math_prompts',
        )
    return [str(answer) for answer in data.meta.metadata["answer"]]
