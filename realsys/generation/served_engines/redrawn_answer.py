"""Keeps ids that stand for no text out of a child's answers, which it samples by itself (pure).

An answer is cut before such an id, and goes on from there by another request with other random numbers:
rejection sampling, so each token is drawn from the distribution over all other ids, and its log-prob
stays that over all ids, as with the embedded engine. Rows of a trained model without a text have a
probability of about nothing, so hardly any answer is ever cut; no request pays for a mask.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from msgspec import structs

from realsys.generation.http.http_json import seed_of_piece
from realsys.generation.http.served_engine import EngineAnswer
from realsys.transport.generation_messages import Finish, GenerateRequest

_MAX_CUTS = 8  # at one position before these ids are barred there; greedy would pick the same again


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A request of the child for a part of an answer. ``barred``: ids that it must not sample."""

    request: GenerateRequest
    barred: tuple[int, ...] = ()


class RedrawnAnswer:
    """One answer, put together of pieces.

    Args:
        request: of the whole answer.
        textless: ids that stand for no text, see textless_ids.py; its own stop tokens among them end it.
    """

    def __init__(self, request: GenerateRequest, textless: Set[int]) -> None:
        self._request = request
        self._textless = textless - {*request.sampling.stop_token_ids}
        self._whole = EngineAnswer(rid=request.rid, prompt_tokens=len(request.input_ids))
        self._before = self._whole  # what earlier pieces gave
        self.num_pieces = self._num_cuts = 0  # cuts: at this position
        self.is_cut = False  # the newest piece: its request may end
        self.goes_on = True  # by another piece
        self._is_barred = False  # this piece is one token, without these ids

    def next_piece(self) -> Piece:
        """Makes the child's next request; the first is the answer's own."""
        self._before = self._whole
        number, self.num_pieces = self.num_pieces, self.num_pieces + 1
        if not number:
            return Piece(request=self._request)
        sampling, done = self._request.sampling, len(self._before.output_ids)
        self._is_barred = self._num_cuts >= (_MAX_CUTS if sampling.temperature > 0 else 1)
        left = 1 if self._is_barred else sampling.max_new_tokens - done
        position = sampling.position + done
        sampling = structs.replace(
            sampling,
            max_new_tokens=left,
            min_new_tokens=min(max(sampling.min_new_tokens - done, 0), left),
            sampling_seed=seed_of_piece(structs.replace(sampling, position=position), number),
            position=0,
        )
        request = structs.replace(
            self._request,
            rid=f"{self._request.rid}~{number}",
            input_ids=(*self._request.input_ids, *self._before.output_ids),
            sampling=sampling,
        )
        barred = tuple(sorted(self._textless)) if self._is_barred else ()
        return Piece(request=request, barred=barred)

    def extended(self, piece: EngineAnswer) -> EngineAnswer:
        """Returns the answer so far, given what the newest piece has so far.

        It is unfinished where that piece is cut or has not ended, or was one token of several.
        """
        ids = piece.output_ids
        refused = () if self._is_barred else self._textless  # a child may not heed it: no third way
        num = next((i for i, token in enumerate(ids) if token in refused), len(ids))
        is_cut, before = num < len(ids), self._before
        self._num_cuts = is_cut + (0 if num else self._num_cuts)
        done = len(before.output_ids) + num
        is_short = self._is_barred and 0 < done < self._request.sampling.max_new_tokens
        self.is_cut, self.goes_on = is_cut, is_cut or (is_short and piece.finish is Finish.LENGTH)
        self._whole = EngineAnswer(
            rid=self._request.rid,
            output_ids=before.output_ids + ids[:num],
            logprobs=before.logprobs + piece.logprobs[:num],
            versions=before.versions + piece.versions[:num],
            finish=None if self.goes_on else piece.finish,
            prompt_tokens=len(self._request.input_ids),
            cached_tokens=piece.cached_tokens if self.num_pieces == 1 else before.cached_tokens,
        )
        return self._whole
