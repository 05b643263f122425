"""Log of each ticket's life: a line when it is granted, one when it has ended.

Small lines without texts, which are not synced: what a killed process leaves unwritten is a ticket without
an end, which ``realsys audit`` takes for lost.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.observability.optional_rows import OptionalRows
from realsys.rollout.worker.group import EpisodeGroup
from realsys.transport.rollout_messages import Ticket
from realsys.trial.episode_records import EpisodeState


@dataclass(frozen=True, kw_only=True)
class TicketEnd:
    """How a ticket ended, after the master's reply.

    Attributes:
        version: number of steps that were trained when the master decided.
        is_closed: its question is not given out again, without having been delivered.
    """

    state: EpisodeState
    why: str = ""
    version: int
    is_closed: bool = False


class EpisodeLog:
    """Appends lines to a worker's log, the first when it is opened. A full disk fails no run."""

    def __init__(self, path: Path) -> None:
        self._file = OptionalRows(path)
        self._append(EpisodeState.STARTED, {"pid": os.getpid()})

    def granted(self, ticket: Ticket) -> None:
        """Notes that the worker has got ``ticket`` and runs its episodes from now on."""
        self._append(
            EpisodeState.GRANTED,
            {**_name_of(ticket), "index": ticket.index, "min_version": ticket.min_version},
        )

    def ended(self, ticket: Ticket, end: TicketEnd, *, group: EpisodeGroup | None) -> None:
        """Notes the end of ``ticket``. ``group``: its episodes, unless it failed."""
        row: dict[str, Any] = {**_name_of(ticket), "version": end.version}
        if end.why:
            row["why"] = end.why
        if end.is_closed:
            row["closed"] = True
        if group is not None:
            row |= {
                "oldest": group.oldest,
                "newest": group.newest,
                "tokens": sum(group.answer_lengths),
                # of each episode the tokens that were sampled in each of its sequences
                "sequences": [[sum(s.from_policy) for s in e.sequences] for e in group.episodes],
            }
        self._append(end.state, row)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, state: EpisodeState, row: dict[str, Any]) -> None:
        self._file.append({"state": state.value, "at": round(time.time(), 3), **row})


def _name_of(ticket: Ticket) -> dict[str, Any]:
    return {"id": ticket.id, "tries": ticket.tries}
