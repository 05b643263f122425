"""Names the lines that a rollout worker writes about its tickets and episodes (pure).

``episodes/<worker's index>.jsonl`` in the attempt's rows: a line when its process starts, one when
a ticket is granted, from when on its episodes run, and one when it has ended. One writer per file.
``realsys audit`` reads them; texts and rewards are in ``rollouts/`` beside it.

``agents/<worker's index>/episodes.jsonl`` has a line when an episode of an agent behind the endpoint
begins, and one when it has ended, however: ``realsys explain`` names those that do not end.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from realsys.trial.records import PhaseFiles


class EpisodeState(StrEnum):
    """What a line says."""

    STARTED = "started"  # the worker's process: what an earlier one was at is lost
    GRANTED = "granted"
    DELIVERED = "delivered"
    REFUSED = "refused"  # the master no longer needed it
    FILTERED = "filtered"
    FAILED = "failed"
    UNSCORED = "unscored"


AGENT_EPISODES = "episodes.jsonl"


class EpisodeMark(StrEnum):
    """What a line about a single episode says."""

    STARTED = "started"  # the worker's process: what an earlier one was at is over
    BEGAN = "began"
    ENDED = "ended"


def episodes_file(files: PhaseFiles, *, attempt: int, index: int) -> Path:
    """Path of the lines of ``rollout_worker/index`` in an attempt."""
    return files.rows_of(attempt).episodes / f"{index}.jsonl"
