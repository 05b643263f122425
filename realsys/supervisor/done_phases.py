"""Phases that an earlier attempt has finished: its supervisor was lost before it could say so.

The done mark is written after a fenced write, into the attempt's own folder. It counts when that attempt is
the head of the phase's lineage: nobody went on after it.
"""

from __future__ import annotations

import json

from realsys.api.trial import AttemptRecord, TrialFiles, read_record


def attempt_that_finished(files: TrialFiles, phase: str) -> int | None:
    """The attempt that finished the phase, if one has and its work counts."""
    for attempt in reversed(files.all_attempts()):
        if not attempt.resumed(phase).exists():
            continue  # it did not get so far in this phase
        record = read_record(AttemptRecord, attempt.record)
        try:
            marker = json.loads(attempt.done(phase).read_text())
        except (OSError, ValueError):
            return None
        is_its_own = record is not None and marker.get("token") == record.token
        return attempt.number if is_its_own else None
    return None
