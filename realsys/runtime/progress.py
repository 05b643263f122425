"""A counter that whoever computes ticks, so that others see whether a process gets on.

Everything that computes may tick: a micro-batch, a decoding step, a request. The worker
puts the counter into memory that its heartbeat process reads (realsys/heartbeat/heartbeat_process.py);
elsewhere it counts for nobody. Ticks may be lost between threads: only a change is ever looked at.
"""

from __future__ import annotations

import struct
from collections.abc import MutableSequence
from typing import Any

_COUNT = struct.Struct("<Q")
COUNTER_BYTES = _COUNT.size
_memory: Any = bytearray(COUNTER_BYTES)


def count_in(memory: MutableSequence[int]) -> None:
    """From now on ticks are counted in ``memory`` (``COUNTER_BYTES`` bytes at least, e.g. an mmap)."""
    global _memory
    _memory = memory


def tick() -> None:
    """Says: this process gets on. Costs less than a microsecond."""
    _COUNT.pack_into(_memory, 0, (_COUNT.unpack_from(_memory)[0] + 1) & 0xFFFF_FFFF_FFFF_FFFF)


def ticks(memory: Any = None) -> int:
    """How often it was said, in ``memory`` or in this process's own."""
    count: int = _COUNT.unpack_from(_memory if memory is None else memory)[0]
    return count
