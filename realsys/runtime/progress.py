"""A counter that computing code increments, so that others can see whether a process makes
progress.

Anything that computes may tick: a micro-batch, a decoding step, a request. A worker places the
counter in memory that its heartbeat process reads (realsys/heartbeat/heartbeat_process.py); in
other processes nothing reads it. Ticks may be lost between threads: readers only check for a
change.
"""

from __future__ import annotations

import struct
from collections.abc import MutableSequence
from typing import Any

_COUNT = struct.Struct("<Q")
COUNTER_BYTES = _COUNT.size
_memory: Any = bytearray(COUNTER_BYTES)


def count_in(memory: MutableSequence[int]) -> None:
    """Counts ticks in ``memory`` from now on (at least ``COUNTER_BYTES`` bytes, e.g. an mmap)."""
    global _memory
    _memory = memory


def tick() -> None:
    """Records that this process makes progress. Costs less than a microsecond."""
    _COUNT.pack_into(_memory, 0, (_COUNT.unpack_from(_memory)[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF)


def ticks(memory: Any = None) -> int:
    """Returns the count in ``memory``, or in this process's own counter."""
    count: int = _COUNT.unpack_from(_memory if memory is None else memory)[0]
    return count
