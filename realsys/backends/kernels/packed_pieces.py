"""Which tokens of packed sequences a causal model must compute, and how its attention finds its sequences.

What answers to one question begin with is computed once, and a last token not at all where nobody asks what
follows it. Sequences of about one length are put side by side in a rectangle padded on the right. Pure; for
packed_attention.py.

Shape suffixes: N packed tokens, U those that are computed, B sequences, T the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

_SHORT = 16  # all sequences up to so long are put together
_AS_LONG = 0.8  # as the longest of its rectangle a sequence must be, else it goes into the next
_SHARED_FROM = 0.95  # of the tokens may be left to compute; else putting them together costs more


@dataclass(frozen=True)
class Rectangle:
    """Some of the sequences, side by side.

    Attributes:
        num, width: B, T.
        tokens: int64 ``[B * T]``, which of the U stands where; the last one of a sequence also stands on
            its padding. None: the U in order.
        own: int64, the places that are not padding, in order; None: all are.
    """

    num: int
    width: int
    tokens: Tensor | None
    own: Tensor | None


@dataclass(frozen=True)
class Pieces:
    """Which tokens of packed sequences are computed, and who sees whom, for ``attend``.

    Attributes:
        positions: int64 ``[1, U]``, each token's place in its sequence.
        kept: int64 ``[U]``, which of the N are computed; None: all.
        place: int64 ``[N]``, for each token the one of the U that is computed for it; None: itself.
        rectangles: hold all sequences.
        back: int64 ``[U]``, for each its place among the rectangles' own tokens; None: they are in order.
    """

    positions: Tensor
    kept: Tensor | None
    place: Tensor | None
    rectangles: tuple[Rectangle, ...]
    back: Tensor | None

    @classmethod
    def of(
        cls, tokens_N: Tensor, groups: Sequence[Sequence[int]], *, to_the_end: bool = True
    ) -> Pieces:
        """Of sequences of these lengths, in groups that may begin alike.

        Args:
            to_the_end: else what a sequence's last token would give is not asked for.
        """
        device, lengths = tokens_N.device, [length for group in groups for length in group]
        positions = torch.cat([torch.arange(length) for length in lengths])
        place, kept = _shared(tokens_N.cpu(), groups, to_the_end)
        if kept is None and len(set(lengths)) == 1:
            whole = Rectangle(len(lengths), lengths[0], None, None)
            return cls(positions[None].to(device), None, None, (whole,), None)
        starts = [0, *accumulate(lengths)]
        if kept is not None:
            lengths = [_asked(length, to_the_end) for length in lengths]
        made = [
            _rectangle([(starts[i], lengths[i]) for i in alike], place)
            for alike in of_about_one_length(lengths)
        ]
        order = torch.cat([tokens if own is None else tokens[own] for _, _, tokens, own in made])
        # Of a token that stands in several sequences the first one counts.
        num_kept = len(positions) if kept is None else len(kept)
        back = torch.full((num_kept,), len(order)).scatter_reduce_(
            0, order, torch.arange(len(order)), "amin"
        )

        def there(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return cls(
            (positions if kept is None else positions[kept])[None].to(device),
            there(kept),
            None if kept is None else there(place),
            tuple(Rectangle(num, width, there(t), there(own)) for num, width, t, own in made),
            there(back),
        )


def _asked(length: int, to_the_end: bool) -> int:
    """How many tokens of a sequence are looked at; its only one always."""
    return length if to_the_end or length < 2 else length - 1


def _shared(
    tokens_N: Tensor, groups: Sequence[Sequence[int]], to_the_end: bool
) -> tuple[Tensor, Tensor | None]:
    """(``[N]`` → which of the U, ``[U]`` → which of the N); the second is None where little is saved.

    A last token that is not asked for has its predecessor's place.
    """
    place, kept, begin, num_kept = torch.arange(len(tokens_N)), [], 0, 0
    tokens: list[int] = tokens_N.tolist()
    for lengths in groups:
        asked = [_asked(length, to_the_end) for length in lengths]
        begins = [begin, *(begin + end for end in accumulate(lengths))]
        rows = [tokens[a : a + num] for a, num in zip(begins, asked, strict=False)]
        common, first = common_prefix(rows), num_kept
        for i, (a, num, length) in enumerate(zip(begins, asked, lengths, strict=False)):
            own = common if i else 0  # so many are the first sequence's
            place[a : a + own] = torch.arange(first, first + own)
            place[a + own : a + num] = torch.arange(num_kept, num_kept + num - own)
            place[a + num : a + length] = place[a + num - 1]
            kept.append(torch.arange(a + own, a + num))
            num_kept += num - own
        begin = begins[-1]
    if num_kept > _SHARED_FROM * len(tokens_N):
        return torch.arange(len(tokens_N)), None
    return place, torch.cat(kept)


def common_prefix(sequences: Sequence[list[int]]) -> int:
    """How many tokens all begin with."""
    first, last = min(sequences), max(sequences)  # in dictionary order: the others lie between
    same = (a == b for a, b in zip(first, last, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def of_about_one_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences that share a rectangle, longest first; empty ones are in none (pure)."""
    found: list[list[int]] = []
    filled = [i for i, length in enumerate(lengths) if length]
    for i in sorted(filled, key=lambda i: -lengths[i]):
        longest = lengths[found[-1][0]] if found else 0
        if found and (lengths[i] >= _AS_LONG * longest or longest <= _SHORT):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _rectangle(
    pieces: Sequence[tuple[int, int]], place: Tensor
) -> tuple[int, int, Tensor, Tensor | None]:
    """Number, width, tokens and own places of sequences (begin, length)."""
    begins, lengths = (torch.tensor(column)[:, None] for column in zip(*pieces, strict=True))
    width = int(lengths.max())
    column = torch.arange(width)[None]
    tokens = place[(begins + torch.minimum(column, lengths - 1)).flatten()]
    own = (column < lengths).flatten()
    return len(pieces), width, tokens, None if own.all() else own.nonzero().flatten()
