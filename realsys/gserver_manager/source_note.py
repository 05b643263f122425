"""Where the newest weights are, noted for a manager that is started again in the same attempt.

The trainers' endpoints in it are this attempt's, so it lies in the attempt's folder.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from realsys.serving.api import WeightSource

logger = logging.getLogger(__name__)


class SourceNote:
    """A file that holds the newest ``WeightSource``. A disk that refuses costs the note, nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> WeightSource | None:
        """None: no weights have come in this attempt, or the note can't be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=WeightSource)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning(
                "note of the newest weights not read path=%s error=%s", self._path, error
            )
            return None

    def write(self, source: WeightSource) -> None:
        """Whole or not at all."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(source))
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("newest weights not noted path=%s error=%s", self._path, error)
