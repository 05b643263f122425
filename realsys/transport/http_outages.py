"""Tells a service that is away from one that refuses, for what is asked over HTTP (pure)."""

from __future__ import annotations

import aiohttp

AWAY = (408, 429, 502, 503, 504)  # statuses of a server that did not try


def is_away(error: Exception) -> bool:
    """True if a request failed with ``error`` since the service can't be reached, or is overloaded."""
    if isinstance(error, aiohttp.InvalidURL):
        return False
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status in AWAY
    return isinstance(error, aiohttp.ClientError | OSError)
