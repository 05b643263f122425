"""Masks and lengths of the answers in a batch, shared by all interfaces."""

from __future__ import annotations

from itertools import accumulate

import torch

from realsys.algorithms.kept_sets import KeptSets
from realsys.algorithms.sequence_sums import to_tokens
from realsys.api.errors import DataError
from realsys.api.model import GenerationHyperparameters
from realsys.data.answers_layout import KEPT_COUNTS, KEPT_IDS
from realsys.data.sequence_sample import SequenceSample

INPUT, PROMPT_MASK = "packed_input_ids", "prompt_mask"
ANSWER_MASK = "answer_mask"  # what ``answer_mask`` found, kept in a batch that is asked often


def answer_mask(data: SequenceSample) -> torch.Tensor:
    """Returns bool ``[N]``: tokens that the policy wrote and that have a predecessor to predict them.

    Other tokens may lie between them, such as a tool's output. The first token of a sequence is never
    an answer token, not even without a prompt.
    """
    if ANSWER_MASK in data.keys:
        return data.data[ANSWER_MASK]
    mask = ~data.data[PROMPT_MASK]
    lengths = data.piece_lengths(INPUT)
    starts = list(accumulate(lengths, initial=0))[:-1]
    firsts = [start for start, length in zip(starts, lengths, strict=True) if length]
    mask[torch.tensor(firsts, dtype=torch.int64, device=mask.device)] = False
    return mask


def num_answer_tokens(data: SequenceSample) -> float:
    """Counts answer tokens; the ``loss_weight_fn`` of losses that are means over them."""
    return float(answer_mask(data).sum())


def answer_tokens(
    data: SequenceSample, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the answer tokens ``[R]``, and bool ``[N]``: the rows of ``Predictions`` that predict
    them.

    Args:
        mask: restricts the answer tokens.
    """
    mask = answer_mask(data) if mask is None else mask
    # No sequence begins with an answer token, so the row before one is of the same sequence: the
    # last token of a prompt, of an observation, or the answer's own.
    return data.data[INPUT][mask], mask.roll(-1)


def kept_sets(data: SequenceSample, gen: GenerationHyperparameters) -> KeptSets | None:
    """Returns the kept sets of all N tokens; None if all were sampled from the whole vocabulary.

    Raises:
        DataError: the batch lacks them, and ``gen`` restricts.
    """
    if KEPT_COUNTS not in data.keys:
        if not gen.restricts:
            return None
        raise DataError(
            "answers without kept sets, which top_p, top_k and min_new_tokens need",
            where=f"a batch with keys {sorted(data.keys)}",
            fix=f"name {KEPT_COUNTS} and {KEPT_IDS} in the call's input keys; answers that older versions "
            "recorded lack them: sample from all tokens (gen.top_p=1 gen.top_k=0 gen.min_new_tokens=0)",
        )
    return KeptSets(data.data[KEPT_COUNTS], data.data[KEPT_IDS])


def answer_lengths(data: SequenceSample) -> list[int]:
    """Counts each answer's tokens, end tokens included, observations not."""
    pieces = torch.split(answer_mask(data), data.piece_lengths(INPUT))
    return [int(piece.sum()) for piece in pieces]


def of_tokens(per_sequence_B: torch.Tensor, data: SequenceSample) -> torch.Tensor:
    """Returns ``[N]``: on each token the value of its sequence."""
    return to_tokens(per_sequence_B, data.data[INPUT], data.piece_lengths(INPUT))


def one_per_sequence(data: SequenceSample) -> list[list[int]]:
    """Returns ``seqlens`` of a key with one value per sequence."""
    return [[1] * len(pieces) for pieces in data.meta.seqlens[INPUT]]
