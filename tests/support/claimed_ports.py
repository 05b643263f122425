"""Ports for servers that tests start: below those that the kernel hands out, and promised once.

A port that the kernel gave and that was let go may be somebody's before the server listens on it, or while
it is started again.
"""

from __future__ import annotations

import random
import socket

_mine: list[socket.socket] = []  # claims, to the end of this process


def free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row, below those that the kernel hands out.

    Nobody else who asks here gets one of them: several clusters start at once, each some time before its
    servers listen.
    """
    for _ in range(100):
        first = random.SystemRandom().randrange(20_000, 32_000 - count)
        claims = [_claim(port) for port in range(first, first + count)]
        if None not in claims:
            _mine.extend(claim for claim in claims if claim is not None)
            return first
        for claim in claims:
            if claim is not None:
                claim.close()
    raise OSError(f"no {count} free ports in a row between 20000 and 32000")


def _claim(port: int) -> socket.socket | None:
    """A name that one process of this host can have at a time; None if it is taken, or the port is used."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0realsys test port {port}")
    except OSError:
        claim.close()
        return None
    if _is_free(port):
        return claim
    claim.close()
    return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
