"""Log of each ticket's outcome, one line each, with the texts of a few.

``rollouts/<worker's index>.jsonl`` in the attempt's rows: one file per process, since each has one writer.
"""

from __future__ import annotations

import time
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

from realsys.observability.optional_rows import OptionalRows
from realsys.rollout.worker.group import EpisodeGroup
from realsys.rollout.worker.shown_episodes import shown_episodes
from realsys.transport.rollout_messages import Ticket
from realsys.trial.records import PhaseFiles


class TicketOutcome(StrEnum):
    """Outcome of a ticket."""

    KEPT = "kept"
    REFUSED = "refused"  # the master no longer needed it
    FILTERED = "filtered"
    FAILED = "failed"
    UNSCORED = "unscored"  # it got no reward; at the second time the record is set aside


def rollouts_file(files: PhaseFiles, *, attempt: int, index: int) -> Path:
    """Path of the log of ``rollout_worker/index`` in an attempt."""
    return files.rows_of(attempt).rollouts / f"{index}.jsonl"


class RolloutLog:
    """Appends lines to a worker's log; a full disk fails no run.

    Args:
        texts: number of groups per newest version whose texts are written.
    """

    def __init__(self, path: Path, *, tokenizer: Any, texts: int) -> None:
        self._file = OptionalRows(path)
        self._tokenizer, self._texts = tokenizer, texts
        self._written: Counter[int] = Counter()  # version → number of groups with texts

    def note(
        self,
        ticket: Ticket,
        outcome: TicketOutcome,
        *,
        seconds: float,
        why: str = "",
        group: EpisodeGroup | None = None,
    ) -> None:
        """Writes the outcome of ``ticket``. ``group``: its episodes, unless it failed."""
        row: dict[str, Any] = {
            "id": ticket.id,
            "index": ticket.index,
            "tries": ticket.tries,
            "outcome": outcome.value,
            "at": round(time.time(), 3),
            "seconds": round(seconds, 3),
        }
        if why:
            row["why"] = why
        if group is not None:
            row |= {
                "rewards": list(group.rewards),
                "prompt_length": group.prompt_length,
                "answer_lengths": list(group.answer_lengths),
                "truncated": sum(t.truncated for t in group.trajectories),
                "oldest": group.oldest,
                "newest": group.newest,
                "requests": group.request_stats.requests,
                "broken": group.request_stats.broken,
                "servers": sorted(group.request_stats.servers),
            }
            if self._written[group.newest] < self._texts:
                self._written[group.newest] += 1
                row["texts"] = shown_episodes(group.episodes, self._tokenizer)
        self._file.append(row)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
