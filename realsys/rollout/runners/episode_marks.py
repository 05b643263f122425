"""Notes when each episode of a worker's agent begins and ends, for ``realsys explain``.

Small lines that are not synced. A disk without room costs the lines, not the episodes.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from realsys.api.errors import ClusterError
from realsys.observability.jsonl import JsonlAppender
from realsys.trial.episode_records import AGENT_EPISODES, EpisodeMark


class EpisodeMarks:
    """Appends lines to a worker's file, the first when it is opened."""

    def __init__(self, folder: Path) -> None:
        self._file: JsonlAppender | None = None
        with suppress(ClusterError):
            self._file = JsonlAppender(folder / AGENT_EPISODES)
        self._append(EpisodeMark.STARTED, {"pid": os.getpid()})

    def began(self, id_: str) -> None:
        """Notes that an episode begins."""
        self._append(EpisodeMark.BEGAN, {"id": id_})

    def ended(self, id_: str) -> None:
        """Notes that an episode has ended, well or not."""
        self._append(EpisodeMark.ENDED, {"id": id_})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, mark: EpisodeMark, row: dict[str, Any]) -> None:
        if self._file is not None:
            with suppress(ClusterError):
                self._file.append({"state": mark.value, "at": round(time.time(), 3), **row})
