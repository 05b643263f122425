"""How long a transfer may take: a fixed time that is enough for few bytes, and more for many."""

from __future__ import annotations

# On one encrypted connection that shares its ends' cores and links with others. Slower than this is not
# slow but stuck.
SLOWEST_BYTES_PER_S = 50e6


def transfer_time_s(num_bytes: float, *, at_least_s: float) -> float:
    """Seconds for so many bytes (pure); 0 bytes: not known."""
    return max(at_least_s, num_bytes / SLOWEST_BYTES_PER_S)
