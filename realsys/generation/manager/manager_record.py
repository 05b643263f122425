"""Record of the manager's events, one JSON line each: ``generation.jsonl`` in the phase's folder.

Read by people and by the report. ``event`` is one of ``ManagerEvent``; ``at`` is seconds since the epoch.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from realsys.observability.optional_rows import OptionalRows


class ManagerEvent(StrEnum):
    """Kinds of events."""

    MANAGER_UP = "manager_up"
    SERVER_UP = "server_up"  # a new process responds, has the newest weights and accepts requests
    SERVER_SICK = "server_sick"  # ``why``; it gets no requests
    SERVER_BACK = "server_back"  # the same process again
    # It is leaving, and gets no new requests if others are available.
    SERVER_LEAVING = "server_leaving"
    SERVER_LEFT = "server_left"  # it has left for good
    UPDATE_START = "update_start"  # to ``version``, of ``servers``
    UPDATE_END = "update_end"  # ``seconds``, ``paused_s`` (the longest), ``failed``: server → why
    WORKER_LOST = "worker_lost"  # ``worker``: its requests are counted out


class GenerationRecord:
    """Appends to the record. A disk failure is logged once and delays no requests."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        """Opens the file. Raises ClusterError if it can't be written at all."""
        self._file = OptionalRows(path)
        self._attempt = attempt

    def write(self, event: ManagerEvent, **fields: Any) -> None:
        """Appends one line."""
        row = {
            "at": round(time.time(), 3),
            "event": event.value,
            "attempt": self._attempt,
            **fields,
        }
        self._file.append(row)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
