"""Cache slots of the rows of a running batch: prefill, decoding and prefix reuse.

``ContinuousEngine`` assigns each request a slot, a number from 0, which holds the keys and values of its
row's tokens so far. ``FastSlots`` is for models that ``FastForward`` computes; generic_decoder.py for all
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from realsys.generation.cache_bytes import READ_CELLS, READ_TOKENS_FUSED
from realsys.generation.decoding.attention import KeyValues, seen_width
from realsys.generation.decoding.cache_shapes import grown_size, newest_that_fit, rectangles
from realsys.generation.decoding.decoder import FastForward, rounded
from realsys.generation.decoding.length_buckets import (
    ON_CPU,
    ON_GPU,
    LengthBucket,
    ReorderPolicy,
    split_into_buckets,
)
from realsys.generation.decoding.prefix import PrefixCache
from realsys.runtime.progress import tick

# These bound memory, not results, like READ_TOKENS_FUSED.
_READ_TOKENS = 4096  # tokens read in one pass by attention that keeps its scores
_READ_SCORES = 1 << 24  # numbers in its attention scores
_READ_MASK = 1 << 26  # and in the mask of fused attention


class Slots(Protocol):
    """Rows of tokens by slot, and the logits that follow them."""

    def read(
        self, texts: Sequence[tuple[int, ...]], slots: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Prefills each text into its slot; returns logits ``[n, V]`` of the next tokens.

        Also returns how many leading tokens of each were cached. Equal texts are prefilled once.
        """

    def num_new(self, text: tuple[int, ...]) -> int:
        """Number of the text's tokens that ``read`` would have to compute."""

    shares_texts: bool  # equal texts that are read together are computed once

    @property
    def reads_in_pieces(self) -> bool:
        """True if a text may be read a few tokens at a time: ``begin`` … ``read_piece`` … ``read``."""

    def begin(self, text: tuple[int, ...]) -> None:
        """Begins to read a text in pieces, beside all slots; in place of one that was started before."""

    def read_piece(self, num_tokens: int) -> int:
        """Reads so many more tokens of the text that was started; returns how many are left.

        With none left ``read`` finds the text read, once.
        """

    def drop(self) -> None:
        """Forgets the text that was started."""

    def step(self, tokens: Tensor, num_slots: int) -> Tensor:
        """Appends ``tokens[slot]`` to each row; returns logits ``[num_slots or more, V]``.

        Args:
            tokens: int64; a valid token also at slots without a row, up to a multiple of
                ``LARGEST_GRANULE``.
            num_slots: above the highest slot with a row.
        """

    def out_of_order(self) -> bool:
        """True if sorting rows by length with ``arrange``, longest first, would pay."""

    def arrange(self, order: Sequence[int]) -> None:
        """Moves all rows: slot i gets the row of slot ``order[i]``."""

    def free(self, slots: Sequence[int]) -> None:
        """Empties these slots."""

    def keep(self, slots: Sequence[int], texts: Sequence[tuple[int, ...]]) -> None:
        """Stores rows, whose tokens these are, as prefixes for later texts."""

    def forget_prefixes(self) -> None:
        """Drops all stored prefixes."""

    def reload(self) -> None:
        """Takes over the module's current weights; slots keep their contents."""


@dataclass(frozen=True)
class _Prefix:
    """Keys and values of a text, ``[L, width, E]`` each in its own memory, and the next logits."""

    tensors: Sequence[Tensor]
    logits: Tensor | None


@dataclass
class _Prefill:
    """A text that is prefilled once, for one or several slots."""

    text: tuple[int, ...]
    slots: list[int]
    known: int  # tokens at the beginning that ``prefix`` has
    prefix: _Prefix | None

    @property
    def num_new(self) -> int:
        return len(self.text) - self.known


@dataclass
class _PartialText:
    """A text that is read in pieces, in a cache of its own.

    Attributes:
        known: tokens at its beginning that a prefix brought.
        num_read: these and those that were read.
        is_current: all of it is of the present weights.
    """

    text: tuple[int, ...]
    known: int
    num_read: int
    cache: KeyValues
    logits: Tensor | None = None
    is_current: bool = True

    @property
    def as_prefix(self) -> _Prefix:
        return _Prefix([x[0] for x in self.cache.tensors], self.logits)


class FastSlots:
    """Slots in one cache, a rectangle of rows and positions, see ``grown_size``.

    A slot without a row is computed along with the others; what it writes is overwritten before it is
    read.

    Args:
        max_cells: limit of the rectangle, rows times positions, which the caller must not exceed.
    """

    shares_texts = True

    def __init__(
        self,
        forward: FastForward,
        *,
        max_rows: int,
        prefix_bytes: int,
        max_cells: int | None = None,
    ) -> None:
        self.forward = forward
        self.max_rows, self.max_cells = max_rows, max_cells
        self.prefixes: PrefixCache[_Prefix] = PrefixCache(prefix_bytes)
        self.cache = forward.cache(0, 0)
        # Position of the next token by slot, and 1 where there is a row: counting needs no loop.
        self.positions = torch.zeros(0, dtype=torch.int64, device=forward.device)
        self.in_use = self.positions.clone()
        self.lengths: list[int] = []  # by slot, 0 where there is no row; as positions
        self._cutting = ON_GPU if forward.fused else ON_CPU
        self._read_tokens = READ_TOKENS_FUSED if forward.fused else _READ_TOKENS
        self._disorder = ReorderPolicy(self._cutting)
        self._partial: _PartialText | None = None

    # ---- reading ------------------------------------------------------------------------------

    def read(
        self, texts: Sequence[tuple[int, ...]], slots: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        self._reserve(max(slots) + 1, max(map(len, texts)) + 1)
        readings = self._readings(texts, slots)
        cached = [len(text) for text in texts]  # of those that another of these texts brings
        logits: dict[tuple[int, ...], Tensor] = {}
        new = []
        for text, reading in readings.items():
            cached[slots.index(reading.slots[0])] = reading.known
            if reading.num_new:
                new.append(reading)
                continue
            assert reading.prefix is not None
            assert reading.prefix.logits is not None
            _copy(reading.prefix, reading.known, self.cache.tensors, reading.slots)
            logits[text] = reading.prefix.logits
        if (partial := self._taken(texts)) is not None:
            cached[texts.index(partial.text)] = partial.known
        for group in rectangles(
            [r.num_new for r in new],
            [r.known for r in new],
            max_tokens=self._read_tokens,
            max_entries=READ_CELLS * self._read_tokens,
        ):
            tick()
            batch = [new[i] for i in group]
            for reading, row in zip(batch, self._read_together(batch), strict=True):
                logits[reading.text] = row
        for slot, text in zip(slots, texts, strict=True):
            self.lengths[slot] = len(text)
        self._put_lengths()
        return torch.stack([logits[text] for text in texts]), cached

    def _taken(self, texts: Sequence[tuple[int, ...]]) -> _PartialText | None:
        """Lets go of the text that was read in pieces, as a prefix, if it is one of ``texts``."""
        partial = self._partial
        if partial is None or partial.logits is None or partial.text not in texts:
            return None
        if partial.is_current and self.prefixes.max_bytes:
            self._remember(partial.cache.tensors, [0], [partial.text], [partial.logits])
        self._partial = None
        return partial

    @property
    def reads_in_pieces(self) -> bool:
        return True

    def begin(self, text: tuple[int, ...]) -> None:
        forward = self.forward
        known, prefix = self.prefixes.longest(text) or (0, None)
        known = min(known, len(text) - 1)  # for what follows the last one
        cache = forward.cache(1, seen_width(len(text) + forward.padded_length(1, 1)))
        if prefix is not None:
            _copy(prefix, known, cache.tensors, [0])
        self._partial = _PartialText(text, known, known, cache)

    def read_piece(self, num_tokens: int) -> int:
        partial = self._partial
        assert partial is not None
        first = partial.num_read
        piece = partial.text[first : first + num_tokens]
        length = self.forward.padded_length(1, len(piece))
        padding = [0] * (length - len(piece))  # the next piece's take its place
        tokens = torch.tensor([[*piece, *padding]], device=self.forward.device)
        positions = torch.arange(first, first + length, device=self.forward.device)[None]
        hidden = self._in_pieces(tokens, positions, partial.cache, fresh=first == 0)
        partial.num_read += len(piece)
        left = len(partial.text) - partial.num_read
        if not left:
            partial.logits = self.forward.logits(hidden, [len(piece) - 1])[0]
        return left

    def drop(self) -> None:
        self._partial = None

    def num_new(self, text: tuple[int, ...]) -> int:
        known, _ = self.prefixes.longest(text) or (0, None)
        return len(text) - known

    def _readings(
        self, texts: Sequence[tuple[int, ...]], slots: Sequence[int]
    ) -> dict[tuple[int, ...], _Prefill]:
        readings: dict[tuple[int, ...], _Prefill] = {}
        for text, slot in zip(texts, slots, strict=True):
            if text in readings:
                readings[text].slots.append(slot)
                continue
            if (
                self._partial is not None
                and self._partial.text == text
                and self._partial.logits is not None
            ):
                readings[text] = _Prefill(text, [slot], len(text), self._partial.as_prefix)
                continue
            known, prefix = self.prefixes.longest(text) or (0, None)
            if prefix is not None and known == len(text) and prefix.logits is None:
                known -= 1  # its last token is read again, for what follows it
            readings[text] = _Prefill(text, [slot], known, prefix)
        return readings

    def _read_together(self, batch: Sequence[_Prefill]) -> Tensor:
        """Prefills a batch, places its rows into their slots and stores prefixes; returns logits
        ``[len(batch), V]``.
        """
        forward, num_rows = self.forward, len(batch)
        length = forward.padded_length(num_rows, max(r.num_new for r in batch))
        begins = [r.known for r in batch]
        scratch = forward.cache(num_rows, seen_width(max(begins) + length))
        own = scratch.tensors
        for i, reading in enumerate(batch):
            if reading.prefix is not None:
                _copy(reading.prefix, reading.known, own, [i])
        tokens = torch.tensor(
            [[*r.text[r.known :], *[0] * (length - r.num_new)] for r in batch],
            device=forward.device,
        )
        begin = torch.tensor(begins, device=forward.device)[:, None]
        positions = begin + torch.arange(length, device=forward.device)
        hidden = self._in_pieces(tokens, positions, scratch, fresh=not any(begins))
        ends = [i * length + r.num_new - 1 for i, r in enumerate(batch)]
        logits = forward.logits(hidden, ends)
        self._place_rows(own, batch)
        if self.prefixes.max_bytes:
            self._remember(own, range(num_rows), [r.text for r in batch], list(logits))
        return logits

    def _in_pieces(
        self, tokens: Tensor, positions: Tensor, cache: KeyValues, *, fresh: bool
    ) -> Tensor:
        """Runs ``FastForward.run``, a few columns at a time if it would need much memory."""
        num_rows, length = tokens.shape
        size = self._columns(num_rows, length, cache.width, fresh=fresh)
        size = self.forward.padded_length(num_rows, size)
        pieces = []
        for begin in range(0, length, size):
            tick()
            columns = slice(begin, begin + size)
            # Later positions would be masked work.
            seen = min(cache.width, seen_width(int(positions[:, columns].max()) + 1))
            buckets = [LengthBucket(0, num_rows, seen)]
            first = fresh and begin == 0
            x = self.forward.run(
                tokens[:, columns], positions[:, columns], cache, buckets, fresh=first
            )
            pieces.append(x.view(num_rows, -1, x.shape[-1]))
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def _columns(self, num_rows: int, length: int, width: int, *, fresh: bool) -> int:
        """Number of tokens of each row to process at a time."""
        if self.forward.reads_in_blocks(width):
            return max(1, self._read_tokens // num_rows)
        if not self.forward.fused:
            scores = num_rows * self.forward.num_heads * width
            return max(1, _READ_SCORES // scores)
        most = max(1, self._read_tokens // num_rows)
        if fresh and length <= most:
            return length
        return max(1, min(most, _READ_MASK // (num_rows * width)))

    def _place_rows(self, rows: Sequence[Tensor], batch: Sequence[_Prefill]) -> None:
        source = [i for i, r in enumerate(batch) for _ in r.slots]
        target = [slot for r in batch for slot in r.slots]
        width = min(rows[0].shape[2], self.cache.width)
        take = torch.tensor(source, device=self.positions.device)
        put = torch.tensor(target, device=self.positions.device)
        for mine, theirs in zip(self.cache.tensors, rows, strict=True):
            mine[put, :, :width] = theirs[take, :, :width]

    # ---- the batch ----------------------------------------------------------------------------

    def step(self, tokens: Tensor, num_slots: int) -> Tensor:
        num_rows = rounded(num_slots, self.forward.granule)
        self._reserve(num_slots, max(self.lengths) + 1)
        in_cache = min(num_rows, self.cache.num_rows)
        widths = [seen_width(n + 1) for n in self.lengths[:in_cache]]
        buckets = split_into_buckets(widths, self._cutting)
        self._disorder.note(widths, buckets)
        positions = self.positions[:num_rows]
        hidden = self.forward.run(tokens[:num_rows, None], positions[:, None], self.cache, buckets)
        positions += self.in_use[:num_rows]
        self.lengths = [n + 1 if n else 0 for n in self.lengths]
        return self.forward.logits(hidden)

    def out_of_order(self) -> bool:
        return self._disorder.due(self.lengths)

    def arrange(self, order: Sequence[int]) -> None:
        take = torch.tensor(order, device=self.positions.device)
        width = seen_width(max(self.lengths))
        for x in self.cache.tensors:
            x[: len(order), :, :width] = x[take, :, :width]
        lengths = [self.lengths[slot] for slot in order]
        self.lengths = lengths + [0] * (len(self.lengths) - len(order))
        self._put_lengths()
        self._disorder.ordered()

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.lengths[slot] = 0
        where = torch.tensor(slots, device=self.positions.device)
        self.positions[where] = 0
        self.in_use[where] = 0

    def _put_lengths(self) -> None:
        self.positions.copy_(torch.tensor(self.lengths))
        self.in_use.copy_(self.positions > 0)

    def keep(self, slots: Sequence[int], texts: Sequence[tuple[int, ...]]) -> None:
        if not self.prefixes.max_bytes:
            return
        self._remember(self.cache.tensors, slots, texts, [None] * len(texts))

    def _remember(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[int],
        texts: Sequence[tuple[int, ...]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Stores row ``rows[i]`` of each tensor as prefix of text i. Copied: a view would hold the
        whole batch.
        """
        of_a_token = sum(x[0, :, 0].numel() * x.element_size() for x in tensors)
        sizes = [
            len(text) * of_a_token + (0 if after is None else after.numel() * after.element_size())
            for text, after in zip(texts, logits, strict=True)
        ]
        for i in newest_that_fit(sizes, self.prefixes.max_bytes):
            own = [x[rows[i], :, : len(texts[i])].clone() for x in tensors]
            after = logits[i]
            kept = _Prefix(own, None if after is None else after.clone())
            self.prefixes.put(texts[i], kept, sizes[i])

    def forget_prefixes(self) -> None:
        self.prefixes.clear()
        if self._partial is not None:
            self._partial.is_current = False

    def reload(self) -> None:
        self.forward.reload()
        if not any(self.lengths):
            # NaN left by bad weights would spread, since it is summed with weight 0.
            self.cache, self.lengths = self.forward.cache(0, 0), []
            self.positions = self.in_use = self.positions[:0]

    def _reserve(self, num_rows: int, width: int) -> None:
        """Grows the cache for so many rows of so many tokens, and for the present rows."""
        old, granule = self.cache, self.forward.granule
        if num_rows <= old.num_rows and width <= old.width:
            return
        used = max((slot + 1 for slot, n in enumerate(self.lengths) if n), default=0)
        shape = grown_size(
            (old.num_rows, old.width),
            (max(num_rows, used), max(width, max(self.lengths, default=0) + 1)),
            most_rows=self.max_rows,
            granule=granule,
            least_rows=self.forward.least_rows,
            max_entries=self.max_cells,
        )
        old.resize(*shape)
        num = rounded(shape[0], granule)
        more = self.positions.new_zeros(max(0, num - len(self.positions)))
        self.positions = torch.cat([self.positions[:num], more])
        self.in_use = torch.cat([self.in_use[:num], more])
        self.lengths = self.lengths[:num] + [0] * len(more)


def _copy(prefix: _Prefix, length: int, tensors: Sequence[Tensor], rows: Sequence[int]) -> None:
    """Copies a prefix to the beginning of each of ``rows``."""
    for mine, theirs in zip(tensors, prefix.tensors, strict=True):
        for row in rows:
            mine[row, :, :length] = theirs[:, :length]
