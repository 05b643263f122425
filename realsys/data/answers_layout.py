"""The batch layout of answers, shared by backend engines and rollout workers.

Grouped by prompt: an id owns one sequence per answer. ``prompt_mask`` alone decides which tokens are
trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realsys.api.errors import DataError
from realsys.data.sequence_sample import SequenceSample

INPUT, PROMPT_MASK, LOGPROBS = "packed_input_ids", "prompt_mask", "packed_logprobs"
NO_EOS = "seq_no_eos_mask"


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """One sequence with one entry per token.

    Attributes:
        tokens: int64 ``[T]``, the prompt and everything after it.
        is_prompt: bool ``[T]``, False on tokens that the policy wrote.
        logprobs: float32 ``[T]``, of the policy's tokens; 0 elsewhere.
    """

    tokens: Tensor
    is_prompt: Tensor
    logprobs: Tensor


def answer_row(prompt: Tensor, answer: Tensor, logprobs: Tensor) -> AnswerRow:
    """Builds the row of a prompt (int64 ``[P]``) and one answer (int64, float32 ``[A]``)."""
    return AnswerRow(
        tokens=torch.cat([prompt, answer]),
        is_prompt=torch.cat([torch.ones_like(prompt), torch.zeros_like(answer)]).bool(),
        logprobs=torch.cat([torch.zeros_like(prompt).float(), logprobs]),
    )


def answers_sample(
    ids: Sequence[str],
    groups: Sequence[Sequence[AnswerRow]],
    truncated: Tensor,
    *,
    metadata: Mapping[str, Sequence[Any]],
) -> SequenceSample:
    """Builds the sample that ``PipelinableEngine.generate`` specifies.

    Args:
        groups: the answers of each id.
        truncated: bool, one per answer in the order of ``groups``: True if it has no end token.
    Raises:
        DataError: no ids.
    """
    if not ids:
        raise DataError("no prompts", where="generate", fix="pass at least one id")
    lengths = [[len(row.tokens) for row in rows] for rows in groups]
    every = [row for rows in groups for row in rows]
    data = {
        INPUT: torch.cat([row.tokens for row in every]),
        PROMPT_MASK: torch.cat([row.is_prompt for row in every]),
        LOGPROBS: torch.cat([row.logprobs for row in every]),
    }
    return SequenceSample.from_tensors(
        ids,
        {**dict.fromkeys(data, lengths), NO_EOS: [[1] * len(rows) for rows in groups]},
        {**data, NO_EOS: truncated},
        metadata=metadata,
    )
