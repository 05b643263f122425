"""What a language model says about the next tokens, computed where it is asked for and a part at a time.

Logits are tokens × vocabulary, of a real model the largest tensor by far. Here are the states that they are
made from, and the head that makes them: a loss asks for log-probabilities of the rows it counts, and
logits exist for one chunk of rows at a time, in the backward pass too, where they are computed again.
What fits into one chunk is computed once, for all rows and at the beginning.

Shape suffixes: N packed tokens, U those that the model computed, R rows asked for, H width of a state,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realsys.algorithms.kept_sets import KeptSets
from realsys.algorithms.logprobs import entropy, gather_logprobs, shift_to_next_token
from realsys.api.data import logits_at_once
from realsys.data.ragged import rows_at

Head = Callable[[Tensor], Tensor]


class Predictions:
    """Row t of N is about the token at t + 1. What is said at the last token of a sequence, about nothing
    that is there, may be anything."""

    def __init__(
        self, states_UH: Tensor, head: Head, *, vocab_size: int, place_N: Tensor | None = None
    ) -> None:
        """
        Args:
            head: ``[n, H]`` → logits ``[n, V]``, each row by itself.
            place_N: int64, which of the U stands for each token; None: itself.
        """
        self.vocab_size = vocab_size
        self._rows_at_once = logits_at_once(vocab_size)
        self._place_N = place_N
        if len(states_UH) <= self._rows_at_once:
            states_UH, head = head(states_UH), _as_it_is
        self._states_UH, self._head = states_UH, head

    @classmethod
    def of_logits(cls, logits_NV: Tensor) -> Predictions:
        """From logits that are there already."""
        return cls(logits_NV, _as_it_is, vocab_size=logits_NV.shape[-1])

    def logprobs(
        self,
        tokens_R: Tensor,
        rows_N: Tensor | None = None,
        *,
        temperature: float = 1.0,
        kept: KeptSets | None = None,
    ) -> Tensor:
        """float32 ``[R]``: log p of ``tokens_R``, each by its row; of ``[R, K]``, of several a row.

        Args:
            rows_N: bool, which rows; or int64 ``[R]``, their numbers; None: all.
            kept: of each token, the tokens over which p is normalised; None: the whole vocabulary.
        """

        def of_chunk(logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return (gather_logprobs(logits, tokens, temperature=temperature),)

        (logprob_R,) = self._by_chunks(of_chunk, tokens_R, rows_N, kept)
        return logprob_R

    def logprobs_and_entropy(
        self,
        tokens_R: Tensor,
        rows_N: Tensor | None = None,
        *,
        temperature: float = 1.0,
        train_entropy: bool = False,
        kept: KeptSets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``logprobs``, and the entropy ``[R]`` of each row's distribution (over ``kept``, if given), with
        a gradient if ``train_entropy``.
        """

        def of_chunk(logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            # The entropy last: without a gradient it is not computed again.
            logprob = gather_logprobs(logits, tokens, temperature=temperature)
            with torch.set_grad_enabled(train_entropy and torch.is_grad_enabled()):
                return logprob, entropy(logits, temperature=temperature)

        logprob_R, entropy_R = self._by_chunks(of_chunk, tokens_R, rows_N, kept)
        return logprob_R, entropy_R

    def top_k(self, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The ``k`` most probable tokens of each row, int64 ``[N, k]``, and their log p, float32; all,
        where there are fewer.
        """

        def of_chunk(logits: Tensor, _: Tensor) -> tuple[Tensor, ...]:
            ids = logits.topk(min(k, logits.shape[1]), dim=1).indices
            return ids, gather_logprobs(logits, ids, temperature=temperature)

        rows = self._states_UH if self._place_N is None else self._place_N
        ids, logprobs = self._by_chunks(of_chunk, rows.new_zeros(len(rows)), None, None)
        return ids, logprobs

    def logits(self, rows_N: Tensor | None = None) -> Tensor:
        """``[R, V]`` of these rows, or of all, as the model gives them.

        At real size that is most of a GPU's memory: ask for few rows.
        """
        return self._head(self._states_of(rows_N))

    def nothing(self) -> Tensor:
        """0 with a gradient of 0 for every weight: where shards of weights need one."""
        return self._head(self._states_UH[:1]).sum() * 0.0

    def _by_chunks(
        self,
        of_chunk: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        tokens_R: Tensor,
        rows_N: Tensor | None,
        kept: KeptSets | None,
    ) -> list[Tensor]:
        """What ``of_chunk`` makes of logits (limited to ``kept``) and tokens, of all rows."""

        def of_states(states: Tensor, tokens: Tensor, sets: KeptSets | None) -> tuple[Tensor, ...]:
            logits = self._head(states)
            return of_chunk(logits if sets is None else sets.limit(logits), tokens)

        num = self._rows_at_once
        states = torch.split(self._states_of(rows_N), num)
        sets = [None] * len(states) if kept is None else kept.split(num)
        again = len(states) > 1 and torch.is_grad_enabled()
        parts = [
            checkpoint(of_states, *part, use_reentrant=False, preserve_rng_state=False)
            if again
            else of_states(*part)
            for part in zip(states, torch.split(tokens_R, num), sets, strict=True)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _states_of(self, rows_N: Tensor | None) -> Tensor:
        index_R = self._place_N
        if rows_N is not None:
            index_R = rows_N.nonzero().flatten() if rows_N.dtype == torch.bool else rows_N
            index_R = index_R if self._place_N is None else self._place_N[index_R]
        return self._states_UH if index_R is None else rows_at(self._states_UH, index_R)


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def nothing_of(output: Tensor | Predictions) -> Tensor:
    """0 with a gradient of 0 for every weight that made a model's ``output``."""
    return output.nothing() if isinstance(output, Predictions) else output.sum() * 0.0


def next_token_logprobs(
    predictions: Predictions,
    packed_input_ids: Tensor,
    lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
) -> Tensor:
    """float32 ``[N]``: at position t of a sequence, log p(token t | tokens before t).

    Position 0 of every sequence, which nothing predicts, is 0.

    Args:
        packed_input_ids: int64 ``[N]``.
        lengths: of the packed sequences; they add up to N.
        kept: of each of the N tokens, the tokens over which p is normalised.
    """
    next_ids, kept = _of_next_tokens(packed_input_ids, kept)
    logprob_N = predictions.logprobs(next_ids, temperature=temperature, kept=kept)
    return shift_to_next_token(logprob_N, lengths)


def next_token_figures(
    predictions: Predictions,
    packed_input_ids: Tensor,
    lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    kept: KeptSets | None = None,
) -> Tensor:
    """float32 ``[N, 2]``: ``next_token_logprobs``, and the entropy of what each token was drawn from."""
    next_ids, kept = _of_next_tokens(packed_input_ids, kept)
    found = predictions.logprobs_and_entropy(next_ids, temperature=temperature, kept=kept)
    return torch.stack([shift_to_next_token(x, lengths) for x in found], 1)


def _of_next_tokens(ids_N: Tensor, kept: KeptSets | None) -> tuple[Tensor, KeptSets | None]:
    """Each row's next token with its kept set; the label at a sequence's end is dropped by the shift."""
    if kept is not None:
        kept = kept.take(torch.arange(len(ids_N), device=ids_N.device).roll(-1))
    return ids_N.roll(-1), kept
