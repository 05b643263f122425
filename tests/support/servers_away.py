"""Generation servers that can't be reached while a file is there: requests and health checks are lost.

``--import tests/support/servers_away.py``, with the file's path in ``REALSYS_TEST_SERVERS_AWAY``.
Servers that are killed or stopped instead are started again by their supervisor, five times an hour.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from realsys.api.errors import WorkerLost
from realsys.generation.http.http_client import HttpGenerationClient

VARIABLE = "REALSYS_TEST_SERVERS_AWAY"
AWAY = Path(os.environ.get(VARIABLE, "/nowhere"))

_generate, _healthy = HttpGenerationClient.generate, HttpGenerationClient.healthy


async def _lost_generate(self: HttpGenerationClient, *args: Any, **options: Any) -> Any:
    """An answer that is on its way when the servers leave is lost, too."""
    result = None if AWAY.exists() else await _generate(self, *args, **options)
    if AWAY.exists():
        await asyncio.sleep(0.05)
        raise WorkerLost("connection refused", where="test", fix="wait")
    return result


async def _lost_healthy(self: HttpGenerationClient, **options: Any) -> bool:
    return not AWAY.exists() and await _healthy(self, **options)


HttpGenerationClient.generate = _lost_generate  # type: ignore[method-assign]
HttpGenerationClient.healthy = _lost_healthy  # type: ignore[method-assign]
