"""Data set of preference pairs: two whole sequences a record, the chosen answer first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.dataset_arguments import PreferencePairsArguments
from realsys.data.sources.math_questions import MathSFT
from realsys.data.sources.record_shape import question_of


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferencePairs(MathSFT, PreferencePairsArguments):
    """Data set of ``packed_input_ids``: of each record, the prompt with either answer and the end token;
    and ``prompt_mask``, bool, True on the prompt.

    Tokens are those of fine-tuning, so a classifier reads what a policy of the same tokenizer writes.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return ("packed_input_ids", "prompt_mask")

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        pairs = [[self.side(i, name) for name in (self.chosen, self.rejected)] for i in indices]
        sides = [side for pair in pairs for side in pair]
        lengths = [[len(prompt) + len(answer) for prompt, answer in pair] for pair in pairs]
        tokens = [token for prompt, answer in sides for token in prompt + answer]
        mask = [
            is_prompt
            for prompt, answer in sides
            for is_prompt in [True] * len(prompt) + [False] * len(answer)
        ]
        return SequenceSample.from_tensors(
            ids,
            {"packed_input_ids": lengths, "prompt_mask": lengths},
            {
                "packed_input_ids": torch.tensor(tokens, dtype=torch.int64),
                "prompt_mask": torch.tensor(mask, dtype=torch.bool),
            },
        )

    def side(self, index: int, column: str) -> tuple[list[int], list[int]]:
        """Tokenizes the prompt of record ``index``, and the answer in ``column`` with the end token.

        Raises:
            DataError: there is no such answer, or it is longer than the limits.
        """
        columns = replace(self.columns, answer=column)
        where = self.records.where(index)
        question = question_of(self.records[index], columns, where, needs_answer=True)
        return self._prompt_tokens(index, question), self._answer_tokens(index, question)
