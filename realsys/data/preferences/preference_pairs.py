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
    """Data set of ``packed_input_ids``: of each record, the prompt with either answer and the end token.

    Tokens are those of fine-tuning, so a classifier reads what a policy of the same tokenizer writes.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return ("packed_input_ids",)

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        pairs = [[self.side(i, name) for name in (self.chosen, self.rejected)] for i in indices]
        tokens = [token for pair in pairs for side in pair for token in side]
        return SequenceSample.from_tensors(
            ids,
            {"packed_input_ids": [[len(side) for side in pair] for pair in pairs]},
            {"packed_input_ids": torch.tensor(tokens, dtype=torch.int64)},
        )

    def side(self, index: int, column: str) -> list[int]:
        """Tokenizes the prompt of record ``index``, the answer in ``column`` and the end token.

        Raises:
            DataError: there is no such answer, or it is longer than the limits.
        """
        columns = replace(self.columns, answer=column)
        where = self.records.where(index)
        question = question_of(self.records[index], columns, where, needs_answer=True)
        return self._prompt_tokens(index, question) + self._answer_tokens(index, question)
