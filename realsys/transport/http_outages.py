"""Tells a service that is away from one that refuses, for what is asked over HTTP (pure)."""

from __future__ import annotations

import aiohttp

AWAY = (408, 429, 502, 503, 504)  # statuses of a server that did not try
NO_KEY = (401, 407)
NOT_THERE = (404, 405)


def is_busy(status: int) -> bool:
    """True if a service may answer the same request otherwise in a while."""
    return status in AWAY or status >= 500


def is_misaddressed(status: int) -> bool:
    """True if a status says of each request that it is sent to the wrong place, or with the wrong key."""
    return status in NO_KEY or status in NOT_THERE


def is_away(error: Exception) -> bool:
    """True if a request failed with ``error`` since the service can't be reached, or is overloaded."""
    if isinstance(error, aiohttp.InvalidURL):
        return False
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status in AWAY
    return isinstance(error, aiohttp.ClientError | OSError)
