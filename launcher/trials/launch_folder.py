"""The folder that a trial was launched in: relative paths in its settings are meant from there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from realsys.trial.records import TrialFiles, TrialRecord, read_record


@contextlib.contextmanager
def in_launch_folder(record: TrialRecord | None) -> Iterator[None]:
    """Enters it; does nothing if it is unknown, or can't be entered."""
    folder = record.folder if record is not None else ""
    try:
        entered = contextlib.chdir(folder or ".")
        entered.__enter__()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        entered.__exit__(None, None, None)


def read_trial_record(files: TrialFiles) -> TrialRecord | None:
    """Returns the trial's record, if it is there."""
    return read_record(TrialRecord, files.record)
