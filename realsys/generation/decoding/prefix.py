"""Keys and values of recent beginnings of text, for requests that begin the same.

A table of token sequences, least recently used first, within a bound of bytes. Knows nothing of what it
keeps but its size. Its owner clears it when the weights change.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Kept = TypeVar("Kept")

_MASK = (1 << 61) - 1
_BASE = 0x1D8AF07F3B2C95E1 & _MASK


@dataclass
class _Entry(Generic[Kept]):
    tokens: tuple[int, ...]
    kept: Kept
    num_bytes: int


class PrefixCache(Generic[Kept]):
    """Token sequences and what is kept for each, up to ``max_bytes`` together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[int, int], _Entry[Kept]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tokens: Sequence[int], kept: Kept, num_bytes: int) -> None:
        """Keeps it, in the place of what was kept for these tokens; drops the oldest beyond the bound."""
        if num_bytes > self.max_bytes:
            return
        key = (len(tokens), _hash(tokens))
        self._drop(key)
        self._entries[key] = _Entry(tuple(tokens), kept, num_bytes)
        self._lengths[len(tokens)] += 1
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def longest(self, tokens: Sequence[int]) -> tuple[int, Kept] | None:
        """The longest kept sequence that ``tokens`` begin with: its length and what is kept for it."""
        if not self._entries:
            return None
        found, value = None, 0
        for i, token in enumerate(tokens, start=1):
            value = (value * _BASE + token + 1) & _MASK
            if i in self._lengths:
                entry = self._entries.get((i, value))
                if entry is not None and entry.tokens == tuple(tokens[:i]):
                    found = (i, value)
        if found is None:
            return None
        self._entries.move_to_end(found)
        return found[0], self._entries[found].kept

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
        self._lengths.clear()
        self.num_bytes = 0

    def _drop(self, key: tuple[int, int]) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry.num_bytes
            self._lengths[key[0]] -= 1
            if not self._lengths[key[0]]:
                del self._lengths[key[0]]


def _hash(tokens: Sequence[int]) -> int:
    """Of a sequence, made so that those of all its beginnings come by the way (``longest``)."""
    value = 0
    for token in tokens:
        value = (value * _BASE + token + 1) & _MASK
    return value
