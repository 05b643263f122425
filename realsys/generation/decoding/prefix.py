"""Cache of keys and values of recent text prefixes, for requests that begin with them.

A least-recently-used table of token sequences with a size limit. The kept values are opaque apart
from their size. Its owner clears it when the weights change.
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
    """Token sequences and their kept values, up to ``max_bytes`` in total."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[int, int], _Entry[Kept]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tokens: Sequence[int], kept: Kept, num_bytes: int) -> None:
        """Stores a value, replacing that of the same tokens; drops the oldest beyond the limit."""
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
        """Returns the longest stored prefix of ``tokens``: its length and value."""
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
        """Removes all entries."""
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
    """Hashes a sequence incrementally, so that hashes of all its prefixes are by-products (``longest``)."""
    value = 0
    for token in tokens:
        value = (value * _BASE + token + 1) & _MASK
    return value
