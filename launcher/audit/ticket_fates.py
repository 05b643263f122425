"""Decides what became of each ticket of a trial (pure).

A resume goes back to a checkpoint, so of an older attempt only what its master had decided before counts.
Its lines carry the number of steps that were trained then (``version``), which is compared with the step of
the checkpoint; no clock is. Within the checkpoint's own step it may have been before or after: it was after
if a later attempt gave the question out again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from launcher.audit.audited_run import AuditedRun, TicketRecord, TrainedStep
from realsys.trial.episode_records import EpisodeState

_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?")


class TicketState(StrEnum):
    """What became of a ticket."""

    RUNNING = "running"
    WAITING = "delivered"  # and not trained on yet
    TRAINED = "trained"
    FILTERED = "filtered"
    REFUSED = "refused"
    FAILED = "failed"
    UNSCORED = "unscored"
    TOO_STALE = "too stale"  # delivered, and made again
    WORKER_LOST = "worker lost"
    ATTEMPT_ENDED = "attempt ended"

    @property
    def is_dropped(self) -> bool:
        """Whether its episodes will not be trained on."""
        return self not in (TicketState.RUNNING, TicketState.WAITING, TicketState.TRAINED)


_OF_ENDS = {
    EpisodeState.FILTERED: TicketState.FILTERED,
    EpisodeState.REFUSED: TicketState.REFUSED,
    EpisodeState.FAILED: TicketState.FAILED,
    EpisodeState.UNSCORED: TicketState.UNSCORED,
}


@dataclass(frozen=True, kw_only=True)
class TicketFate:
    """What became of a ticket. ``step``: that trained on it; ``reason``: why it was dropped."""

    ticket: TicketRecord
    state: TicketState
    step: int | None = None
    reason: str = ""


@dataclass
class TicketIndex:
    """Tickets of a run, found by sample and by question."""

    run: AuditedRun
    by_sample: dict[str, list[TicketRecord]] = field(init=False)
    by_id: dict[str, list[TicketRecord]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_sample, self.by_id = defaultdict(list), defaultdict(list)
        for ticket in self.run.tickets:
            self.by_sample[ticket.sample].append(ticket)
            self.by_id[ticket.id].append(ticket)

    def decided_in_time(self, ticket: TicketRecord) -> bool:
        """Returns whether the end of ``ticket`` is part of the run: decided before the checkpoint that the
        run went on from."""
        limits = self.run.limits
        if ticket.attempt not in limits:
            return False
        last = limits[ticket.attempt]
        if last is None or (ticket.version is not None and ticket.version < last):
            return True
        if ticket.version is not None and ticket.version > last:
            return False
        return not any(
            later.attempt > ticket.attempt and later.attempt in limits
            for later in self.by_id[ticket.id]
        )

    def trained_tickets(self, sample: str, step: int) -> list[TicketRecord]:
        """Returns the tickets whose episodes step ``step`` may have trained on: those of that sample in the
        newest attempt that gave it out and isn't newer than the one that trained."""
        trainer = self.run.trainer(step)
        if trainer is None:
            return []
        found = [
            ticket
            for ticket in self.by_sample.get(sample, ())
            if ticket.attempt in self.run.limits and ticket.attempt <= trainer
        ]
        newest = max((ticket.attempt for ticket in found), default=0)
        return [ticket for ticket in found if ticket.attempt == newest]


def trained_ticket(tickets: Sequence[TicketRecord]) -> TicketRecord | None:
    """Returns which of the tickets of one sample was trained on: one that was delivered, else one that no
    line ends, since its worker may have ended right after the delivery."""
    for end in (EpisodeState.DELIVERED, None):
        for ticket in tickets:
            if ticket.end is end:
                return ticket
    return None


def ticket_fates(index: TicketIndex) -> list[TicketFate]:
    """Decides what became of each ticket, in the order of the files."""
    run = index.run
    steps: dict[tuple[int, str, str], int] = {}
    for row in run.steps:
        for sample in row.samples:
            ticket = trained_ticket(index.trained_tickets(sample, row.step))
            if ticket is not None:
                steps[(ticket.attempt, ticket.worker, sample)] = row.step
    return [_fate(index, ticket, steps) for ticket in run.tickets]


def _fate(
    index: TicketIndex, ticket: TicketRecord, steps: Mapping[tuple[int, str, str], int]
) -> TicketFate:
    run = index.run
    if (step := steps.get((ticket.attempt, ticket.worker, ticket.sample))) is not None:
        return TicketFate(ticket=ticket, state=TicketState.TRAINED, step=step)
    if ticket.end is None:
        return _unended(run, ticket)
    if ticket.end is not EpisodeState.DELIVERED:
        return TicketFate(ticket=ticket, state=_OF_ENDS[ticket.end], reason=ticket.why)
    if not index.decided_in_time(ticket):
        return _ended_with_attempt(
            ticket, "delivered after the checkpoint that the run went on from"
        )
    if any(
        _is_later(other, ticket) and other.attempt in run.limits for other in index.by_id[ticket.id]
    ):
        return TicketFate(
            ticket=ticket,
            state=TicketState.TOO_STALE,
            reason="it got too stale, and was made again",
        )
    return TicketFate(ticket=ticket, state=TicketState.WAITING)


def _unended(run: AuditedRun, ticket: TicketRecord) -> TicketFate:
    if ticket.is_lost:
        reason = "its worker ended while it ran"
        return TicketFate(ticket=ticket, state=TicketState.WORKER_LOST, reason=reason)
    if run.is_live and ticket.attempt == run.newest_attempt:
        return TicketFate(ticket=ticket, state=TicketState.RUNNING)
    return _ended_with_attempt(ticket, "its attempt ended while it ran")


def _ended_with_attempt(ticket: TicketRecord, reason: str) -> TicketFate:
    return TicketFate(ticket=ticket, state=TicketState.ATTEMPT_ENDED, reason=reason)


def _is_later(other: TicketRecord, ticket: TicketRecord) -> bool:
    return (other.attempt, other.try_number) > (ticket.attempt, ticket.try_number)


def counted_reasons(fates: Iterable[TicketFate]) -> dict[tuple[str, str], int]:
    """Counts dropped tickets by state and reason. Reasons that differ in their numbers alone are counted
    together, under the first of them.
    """
    first: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for fate in fates:
        if fate.state.is_dropped:
            kind = fate.state.value, _NUMBER.sub("N", fate.reason)
            counts[fate.state.value, first.setdefault(kind, fate.reason)] += 1
    return counts


def samples_of(row: TrainedStep) -> list[tuple[str, str]]:
    """Returns id and sample of each datapoint of a step."""
    return list(zip(row.ids, row.samples, strict=True))
