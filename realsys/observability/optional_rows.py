"""Files of rows that a run can do without, so that a full disk does not end it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realsys.api.errors import RealsysError
from realsys.observability.jsonl import JsonlAppender

logger = logging.getLogger(__name__)


class OptionalRows:
    """Appends rows. What can't be written is left out, and logged once until it goes again."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises ClusterError if it can't be written at all."""
        self._file = JsonlAppender(path)
        self._refused = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes one row, if it can be written."""
        try:
            self._file.append(row)
            self._refused = False
        except (RealsysError, ValueError) as error:  # ValueError: no JSON, as NaN
            if not self._refused:
                what = error.what if isinstance(error, RealsysError) else error
                logger.warning("rows not written path=%s error=%s", self._file.path, what)
            self._refused = True

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
