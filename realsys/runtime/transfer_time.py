"""Time limit of a transfer: a fixed time that suffices for few bytes, and more for many."""

from __future__ import annotations

# Of one encrypted connection that shares cores and links with others. A slower one is stuck.
SLOWEST_BYTES_PER_S = 50e6


def transfer_time_s(num_bytes: float, *, at_least_s: float) -> float:
    """Returns the limit in seconds for ``num_bytes`` (pure); 0 bytes: unknown."""
    return max(at_least_s, num_bytes / SLOWEST_BYTES_PER_S)
