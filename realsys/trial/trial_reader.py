"""Reads the records in a trial's folder, for all that inspect trials: status, ls, watch, explain, report.

Never raises for what is missing, damaged, endless or too large: that is left out, and noted. It reads no
rows of metrics, no name resolution and no Slurm (launcher/trials/status.py adds those).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from realsys.api.errors import ConfigError, RealsysError
from realsys.trial.liveness import Liveness, liveness
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    TrialFiles,
    fresh,
    read_record,
)

if TYPE_CHECKING:  # slow to import; its summary mostly suffices
    from realsys.api.plan import LaunchPlan
    from realsys.trial.plan_summary import PlanSummary

T = TypeVar("T")
MAX_RECORD_BYTES = 64 << 20
MAX_PLAN_BYTES = 1 << 30  # of thousands of workers
MAX_ROWS_BYTES = 4 << 30  # of a file of metrics, events or samples


def note_text(error: Exception) -> str:
    """Renders an error in one line, with its place."""
    where = f" ({error.where})" if isinstance(error, RealsysError) else ""
    return _reason(error) + where


def _reason(error: Exception) -> str:
    return error.what if isinstance(error, RealsysError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Attempt:
    """One attempt, read from its folder.

    Attributes:
        record: None if its supervisor has not written it yet, or it can't be read.
        supervisor: whether it lives, as far as this host can determine; NONE before it has written its
            record, UNKNOWN if that can't be read.
        marker: None until its supervisor has ended it.
    """

    files: AttemptFiles
    record: AttemptRecord | None
    supervisor: Liveness
    marker: ExitMarker | None


class TrialReader:
    """Reads one trial repeatedly, keeping its plan.

    Args:
        wording: renders an error as a note.
    """

    def __init__(
        self, files: TrialFiles, *, wording: Callable[[Exception], str] = note_text
    ) -> None:
        self.files = files
        self.notes: list[str] = []  # what could not be read
        self.unread = ""  # why something could not be read without which the state is unknown
        self.plan_fix = ""  # what to do about a plan that can't be read
        self._wording = wording

    @cached_property
    def _whole_plan(self) -> LaunchPlan:
        from realsys.api.plan import read_plan

        check_regular(self.files.plan, max_bytes=MAX_PLAN_BYTES)
        return read_plan(self.files.plan)

    @cached_property
    def _summary(self) -> LaunchPlan | PlanSummary:
        from realsys.trial.plan_summary import read_plan_summary

        if "_whole_plan" not in self.__dict__:
            check_regular(self.files.plan, max_bytes=MAX_PLAN_BYTES)
            if (found := read_plan_summary(self.files.plan)) is not None:
                return found
        return self._whole_plan  # or the error that says why there is none

    @property
    def plan(self) -> LaunchPlan | None:
        """The plan, if it can be read."""
        with self.noted("its plan can't be read"):
            return self._whole_plan
        return None

    @property
    def summary(self) -> LaunchPlan | PlanSummary | None:
        """The parts of the plan that show how a trial stands, if they can be read."""
        with self.noted("its plan can't be read"):
            try:
                return self._summary
            except ConfigError as error:
                self.plan_fix = error.fix
                raise
        return None

    def record(self, kind: type[T], path: Path) -> T | None:
        """Reads the record at ``path``; None if there is none, or it can't be read."""
        with self.noted():
            return read_bounded_record(kind, path)
        return None

    def attempts(self) -> tuple[Attempt, ...]:
        """Reads all attempts, oldest first."""
        return tuple(self.attempt(files) for files in self.files.all_attempts())

    def last_attempt(self) -> Attempt | None:
        """Reads the newest attempt; None before the first."""
        found = self.files.all_attempts()
        return self.attempt(found[-1]) if found else None

    def attempt(self, files: AttemptFiles) -> Attempt:
        """Reads one attempt.

        Whether its supervisor lives is read before the exit marker: a supervisor that exits between the two
        has written its marker first, so it can't appear lost.
        """
        record, supervisor = None, Liveness.UNKNOWN
        with self.noted(f"the record of attempt {files.number} can't be read"):
            fresh(files.root)  # its supervisor may have written the marker on another host
            record = read_bounded_record(AttemptRecord, files.record)
            supervisor = Liveness.NONE
        if record is not None:
            pid, start = record.supervisor_pid, record.supervisor_start
            supervisor = liveness(record.host, pid, start, record.machine)
        marker = self.record(ExitMarker, files.exit)
        if record is None and marker is not None:  # it had one
            supervisor = Liveness.UNKNOWN
        return Attempt(files, record, supervisor, marker)

    @contextmanager
    def noted(self, unread: str = "") -> Iterator[None]:
        """Turns exceptions into notes, so that the remaining records are still shown.

        Args:
            unread: what can't be read, if the run's liveness is unknown without it.
        """
        try:
            yield
        except Exception as error:  # damaged content fails in any way, inspecting a trial never
            self.note(self._wording(error))
            if unread and not self.unread:
                self.unread = f"{unread}: {_reason(error)}"

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def read_bounded_record(kind: type[T], path: Path) -> T | None:
    """Reads a record as ``read_record`` does, but no endless file, nor one larger than any record.

    Raises:
        OSError, TrialError: it can't be read.
    """
    check_regular(path, max_bytes=MAX_RECORD_BYTES)
    return read_record(kind, path)


def check_regular(path: Path, *, max_bytes: int) -> None:
    """Raises OSError for a pipe, a device, or a larger file; opening it reports anything else."""
    try:
        found = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    if found.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", os.fspath(path))
