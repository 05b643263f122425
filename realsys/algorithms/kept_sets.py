"""Kept sets: the part of the vocabulary that each token was sampled from, and log-probs over it.

A sampler with ``top_p`` or ``top_k`` draws from the renormalised distribution over a set of tokens that it
computed from its own logits. The importance ratio is one between probabilities of the same kind only if
the trainer normalises over the same set, which therefore comes with each token (the layout is that of
realsys/data/answers_layout.py). Reference and proximal policy are compared over the sampler's set too. In a
softmax over a set no member has probability 0, so every ratio and every KL is finite.

Shape suffixes: R tokens, K entries of all their sets together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.api.errors import DataError
from realsys.data.answers_layout import KEPT_BITS

_WORD = 32


@dataclass(frozen=True, eq=False)
class KeptSets:
    """Kept sets of R tokens.

    Attributes:
        counts_R: integers, entries of each; 0: the whole vocabulary.
        ids_K: int32, ids that are kept; or ``~id`` of each that is left out; or a bit for each id.
    Raises:
        DataError: the counts do not add up to the entries.
    """

    counts_R: Tensor
    ids_K: Tensor

    def __post_init__(self) -> None:
        if (total := int(self.counts_R.sum())) != len(self.ids_K):
            raise DataError(
                f"kept sets of {total} entries by their counts, {len(self.ids_K)} are there",
                where="KeptSets",
                fix="packed_kept_counts and packed_kept_ids must be of the same sequences",
            )

    def take(self, rows_R: Tensor) -> KeptSets:
        """Selects the sets of tokens ``rows_R``: int64 indices, or bool, one for each token."""
        if rows_R.dtype == torch.bool:
            rows_R = rows_R.nonzero().flatten()
        counts = self.counts_R.long()
        starts = counts.cumsum(0) - counts
        taken = counts[rows_R]
        # Entry j of a taken set is entry j of the set in this one.
        shift = starts[rows_R] - (taken.cumsum(0) - taken)
        place = torch.arange(int(taken.sum()), device=taken.device) + shift.repeat_interleave(taken)
        return KeptSets(taken, self.ids_K[place])

    def split(self, num: int) -> list[KeptSets]:
        """Splits into parts of ``num`` tokens; the last may be smaller."""
        counts = torch.split(self.counts_R, num)
        ids: Sequence[Tensor] = torch.split(self.ids_K, [int(part.sum()) for part in counts])
        return [KeptSets(part, own) for part, own in zip(counts, ids, strict=True)]

    def mask(self, vocab_size: int) -> Tensor:
        """Returns bool ``[R, V]``: True on the tokens kept."""
        counts_R = self.counts_R.long()
        row_K = torch.arange(len(counts_R), device=counts_R.device).repeat_interleave(counts_R)
        by_bits_R = torch.zeros_like(counts_R, dtype=torch.bool)
        by_bits_R[row_K[self.ids_K == KEPT_BITS]] = True
        listed_K = ~by_bits_R[row_K]
        row_L, entry_L = row_K[listed_K], self.ids_K[listed_K]
        left_out_L = entry_L < 0
        # A model of the same tokens may have fewer rows than the sampler's, whose last ones are padding.
        is_row_L = torch.where(left_out_L, ~entry_L, entry_L) < vocab_size
        # Rows without entries, or with entries that are left out, begin as the whole vocabulary.
        narrow_R = torch.zeros_like(counts_R, dtype=torch.bool)
        narrow_R[row_L[~left_out_L]] = True
        mask_RV = (~narrow_R)[:, None].repeat(1, vocab_size)
        row_L, entry_L, left_out_L = row_L[is_row_L], entry_L[is_row_L], left_out_L[is_row_L]
        mask_RV[row_L, torch.where(left_out_L, ~entry_L, entry_L).long()] = ~left_out_L
        if not listed_K.all():
            entries = self.ids_K[~listed_K].view(int(by_bits_R.sum()), -1)
            bit = torch.arange(_WORD, dtype=torch.int32, device=entries.device)
            bits = (entries[:, 1:, None] >> bit & 1).bool().flatten(1)
            # A vocabulary that is padded for the trainer's layout has more; these were never drawn.
            mask_RV[by_bits_R] = torch.nn.functional.pad(bits, (0, vocab_size - bits.shape[1]))
        return mask_RV

    def limit(self, logits_RV: Tensor) -> Tensor:
        """Returns the logits with -inf on tokens that are not kept; their gradient is 0."""
        return logits_RV.masked_fill(~self.mask(logits_RV.shape[1]), -torch.inf)
