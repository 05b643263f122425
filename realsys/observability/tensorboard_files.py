"""Writes scalars as TensorBoard event files, without torch and TensorFlow.

A resumed run writes a new file whose first event makes TensorBoard drop what older files contain from
that step on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realsys.observability.jsonl import write_errors


class TensorBoardFiles:
    """Writes one event file. Raises ClusterError if the disk refuses it."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = folder
        with write_errors(folder):
            goes_on = folder.is_dir() and any(folder.iterdir())
            self._writer: Any = EventFileWriter(str(folder))
            if goes_on:
                start = SessionLog(status=SessionLog.START)
                event = Event(wall_time=time.time(), step=first_step, session_log=start)
                self._writer.add_event(event)
                self._writer.flush()

    def write(self, step: int, row: Mapping[str, float | int | str]) -> None:
        """Writes the row's numbers under their names; text is skipped."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(value))
            for key, value in sorted(row.items())
            if not isinstance(value, str)
        ]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        with write_errors(self.folder):
            self._writer.add_event(event)
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file; may be called again."""
        with write_errors(self.folder):
            self._writer.close()
