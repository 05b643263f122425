"""The batch layout of answers, shared by backend engines and rollout workers.

Grouped by prompt: an id owns one sequence per answer. ``prompt_mask`` alone decides which tokens are
trained on.

Where tokens are sampled from a part of the vocabulary (``GenerationHyperparameters.restricts``), each
comes with its *kept set*, over which its log-prob is: ``packed_kept_counts`` (int32, one per token) says
how many entries of ``packed_kept_ids`` (int32) are its own. They are the shortest of these; none is the
whole vocabulary, as for prompts:

    id, id, …             the ids kept, ascending
    ~id, ~id, …           negative: those left out
    KEPT_BITS, word, …    bit b of word w (w from 0): whether token 32 w + b is kept
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realsys.api.errors import DataError
from realsys.data.sequence_sample import SequenceSample

INPUT, PROMPT_MASK, LOGPROBS = "packed_input_ids", "prompt_mask", "packed_logprobs"
NO_EOS = "seq_no_eos_mask"
KEPT_COUNTS, KEPT_IDS = "packed_kept_counts", "packed_kept_ids"
KEPT_BITS = -(2**31)  # no vocabulary has a token of this complement


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """One sequence with one entry per token.

    Attributes:
        tokens: int64 ``[T]``, the prompt and everything after it.
        is_prompt: bool ``[T]``, False on tokens that the policy wrote.
        logprobs: float32 ``[T]``, of the policy's tokens; 0 elsewhere.
        kept: kept set of each of the T tokens, int32 in bytes (``encode_kept_sets``); None: not recorded.
    """

    tokens: Tensor
    is_prompt: Tensor
    logprobs: Tensor
    kept: Sequence[bytes] | None = None


def answer_row(
    prompt: Tensor, answer: Tensor, logprobs: Tensor, kept: Sequence[bytes] | None = None
) -> AnswerRow:
    """Builds the row of a prompt (int64 ``[P]``) and one answer (int64, float32 and kept sets ``[A]``)."""
    return AnswerRow(
        kept=None if kept is None else [b""] * len(prompt) + list(kept),
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
        groups: the answers of each id; all with kept sets, or none.
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
    seqlens = {**dict.fromkeys(data, lengths), NO_EOS: [[1] * len(rows) for rows in groups]}
    if all(row.kept is not None for row in every):
        device = data[INPUT].device
        data |= {key: x.to(device) for key, x in _kept_tensors(every).items()}
        per_row = [[sum(map(len, row.kept or ())) // 4 for row in rows] for rows in groups]
        seqlens |= {KEPT_COUNTS: lengths, KEPT_IDS: per_row}
    return SequenceSample.from_tensors(ids, seqlens, {**data, NO_EOS: truncated}, metadata=metadata)


def _kept_tensors(rows: Sequence[AnswerRow]) -> dict[str, Tensor]:
    sets = [kept for row in rows for kept in row.kept or ()]
    ids = np.frombuffer(bytearray(b"".join(sets)), dtype="<i4")
    counts = np.array([len(kept) // 4 for kept in sets], dtype=np.int32)
    return {KEPT_COUNTS: torch.from_numpy(counts), KEPT_IDS: torch.from_numpy(ids)}
