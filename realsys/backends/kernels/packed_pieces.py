"""Plans which tokens of packed sequences a causal model computes, and how attention batches its
sequences.

The common prefix of answers to one question is computed once, and a last token only if its output is
needed. Sequences of similar length are batched in a rectangle padded on the right. Pure; for
packed_attention.py.

Shape suffixes: N packed tokens, U those that are computed, B sequences, T the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

_SHORT_LENGTH = 16  # sequences up to this length share a rectangle
_MIN_LENGTH_RATIO = (
    0.8  # minimum length relative to the longest of the rectangle; shorter ones start the next
)
_MAX_COMPUTED_SHARE = (
    0.95  # share of tokens left to compute above which sharing costs more than it saves
)


@dataclass(frozen=True)
class Rectangle:
    """A padded batch of some of the sequences.

    Attributes:
        num, width: B, T.
        tokens: int64 ``[B * T]``, index among the U at each place; padding repeats the sequence's last
            token. None: the U in order.
        own: int64, the places that are not padding, in order; None: all.
    """

    num: int
    width: int
    tokens: Tensor | None
    own: Tensor | None


@dataclass(frozen=True)
class Pieces:
    """Tokens of packed sequences that are computed, and the rectangles in which ``attend`` runs.

    Attributes:
        positions: int64 ``[1, U]``, each token's position in its sequence.
        kept: int64 ``[U]``, which of the N are computed; None: all.
        place: int64 ``[N]``, index among the U that is computed for each token; None: itself.
        rectangles: together hold all sequences.
        back: int64 ``[U]``, index of each among the rectangles' own tokens; None: in order.
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
        """Plans sequences of these lengths, in groups that may share a prefix.

        Args:
            to_the_end: False if the outputs at last tokens are not needed.
        """
        device, lengths = tokens_N.device, [length for group in groups for length in group]
        positions = torch.cat([torch.arange(length) for length in lengths])
        place, kept = _shared(tokens_N.cpu(), groups, to_the_end)
        if kept is None and len(set(lengths)) == 1:
            whole = Rectangle(len(lengths), lengths[0], None, None)
            return cls(positions[None].to(device), None, None, (whole,), None)
        starts = [0, *accumulate(lengths)]
        if kept is not None:
            lengths = [_num_needed(length, to_the_end) for length in lengths]
        made = [
            _rectangle([(starts[i], lengths[i]) for i in alike], place)
            for alike in group_by_length(lengths)
        ]
        order = torch.cat([tokens if own is None else tokens[own] for _, _, tokens, own in made])
        # For a token shared by several sequences the first one counts.
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


def _num_needed(length: int, to_the_end: bool) -> int:
    """Number of a sequence's tokens whose output is needed, at least one."""
    return length if to_the_end or length < 2 else length - 1


def _shared(
    tokens_N: Tensor, groups: Sequence[Sequence[int]], to_the_end: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns (``[N]`` → index among the U, ``[U]`` → index among the N), None for the latter if
    little is saved.

    A last token that is not needed has its predecessor's place.
    """
    place, kept, begin, num_kept = torch.arange(len(tokens_N)), [], 0, 0
    tokens: list[int] = tokens_N.tolist()
    for lengths in groups:
        asked = [_num_needed(length, to_the_end) for length in lengths]
        begins = [begin, *(begin + end for end in accumulate(lengths))]
        rows = [tokens[a : a + num] for a, num in zip(begins, asked, strict=False)]
        common, first = common_prefix(rows), num_kept
        for i, (a, num, length) in enumerate(zip(begins, asked, lengths, strict=False)):
            own = common if i else 0  # tokens of the first sequence
            place[a : a + own] = torch.arange(first, first + own)
            place[a + own : a + num] = torch.arange(num_kept, num_kept + num - own)
            place[a + num : a + length] = place[a + num - 1]
            kept.append(torch.arange(a + own, a + num))
            num_kept += num - own
        begin = begins[-1]
    if num_kept > _MAX_COMPUTED_SHARE * len(tokens_N):
        return torch.arange(len(tokens_N)), None
    return place, torch.cat(kept)


def common_prefix(sequences: Sequence[list[int]]) -> int:
    """Returns the length of the longest common prefix."""
    first, last = min(sequences), max(sequences)  # in lexicographic order the others lie between
    same = (a == b for a, b in zip(first, last, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups the indices of sequences that share a rectangle, longest first; empty ones in none (pure)."""
    found: list[list[int]] = []
    filled = [i for i, length in enumerate(lengths) if length]
    for i in sorted(filled, key=lambda i: -lengths[i]):
        longest = lengths[found[-1][0]] if found else 0
        if found and (lengths[i] >= _MIN_LENGTH_RATIO * longest or longest <= _SHORT_LENGTH):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _rectangle(
    pieces: Sequence[tuple[int, int]], place: Tensor
) -> tuple[int, int, Tensor, Tensor | None]:
    """Returns number, width, tokens and own places for sequences given as (begin, length)."""
    begins, lengths = (torch.tensor(column)[:, None] for column in zip(*pieces, strict=True))
    width = int(lengths.max())
    column = torch.arange(width)[None]
    tokens = place[(begins + torch.minimum(column, lengths - 1)).flatten()]
    own = (column < lengths).flatten()
    return len(pieces), width, tokens, None if own.all() else own.nonzero().flatten()
