"""Time that passes at once in a running event loop: for waits that end when something came first.

A short limit in real time would also have to be long enough for what must come before its end; see
virtual_time.py for tests in which nothing is real.
"""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Moves the clock of the running loop; all that is due by then is due now."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
