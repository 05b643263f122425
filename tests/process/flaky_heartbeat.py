"""A patient heartbeat process whose store can be taken away: no answers while the file AWAY is there.

``python flaky_heartbeat.py AWAY …``, the rest as the real one gets it. A worker that must exit has a minute
for it: the usual limit is short, for a busy machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from realsys.api.errors import StoreUnavailable
from realsys.heartbeat import heartbeat_process


class Away:
    """Passes every call on, unless the file is there."""

    def __init__(self, inner: Any, away: Path) -> None:
        self._inner, self._away = inner, away

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            if self._away.exists():
                raise StoreUnavailable("taken away", where=str(self._away), fix="none")
            answer = found(*args, **named)
            return AwayLease(answer, self._away) if name == "grant" else answer

        return call


class AwayLease(Away):
    """The same for a lease."""

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "ttl_s"):
            return getattr(self._inner, name)
        return super().__getattr__(name)


if __name__ == "__main__":
    away = Path(sys.argv.pop(1))
    real = heartbeat_process.open_store_at

    def open_store_at(*args: Any, **named: Any) -> Any:
        return Away(real(*args, **named), away)

    heartbeat_process.open_store_at = open_store_at
    heartbeat_process.EXIT_IN_S = 60.0
    heartbeat_process.main()
    os._exit(0)
