"""Proves, or refutes, what a run promises about its datapoints (pure).

No datapoint is trained twice; what is trained was delivered once, by a worker of the attempts that the run
consists of; no token is older than the staleness bound; no question is lost; a ticket without an end
belongs to somebody who ended. Each check is a function from the run to findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.audit.audited_run import AuditedRun, AuditFinding, FindingKind, TicketRecord
from launcher.audit.ticket_fates import (
    TicketIndex,
    counted_reasons,
    samples_of,
    ticket_fates,
    trained_ticket,
)
from realsys.trial.dump_records import SampledVersions
from realsys.trial.episode_records import EpisodeState


@dataclass(frozen=True, kw_only=True)
class CheckedTokens:
    """Tokens whose versions were held against the bound.

    Attributes:
        of_dump: each by its own version. of_rows: by the oldest version of their datapoint.
        unknown: datapoints whose versions are not recorded.
    """

    of_dump: int = 0
    of_rows: int = 0
    unknown: int = 0


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What became of a trial's tickets, and what is wrong.

    Attributes:
        states: state → number of tickets. reasons: (state, first reason of its kind) → number of
            dropped tickets.
        steps, datapoints: that were trained. closed: questions that were filtered or set aside.
    """

    states: Mapping[str, int]
    reasons: Mapping[tuple[str, str], int]
    steps: int
    datapoints: int
    closed: int
    tokens: CheckedTokens
    findings: tuple[AuditFinding, ...]


def audit_run(run: AuditedRun) -> AuditResult:
    """Audits a run."""
    index = TicketIndex(run)
    fates = ticket_fates(index)
    tokens, too_stale = check_staleness(index)
    closed = closed_questions(index)
    findings = [
        *run.unreadable,
        *check_steps(run),
        *check_trained_once(run, closed),
        *(check_deliveries(index) if run.has_tickets else ()),
        *too_stale,
        *check_nothing_missing(index, closed),
        *check_ends(run),
    ]
    return AuditResult(
        states=Counter(fate.state.value for fate in fates),
        reasons=counted_reasons(fates),
        steps=len(run.steps),
        datapoints=sum(len(row.ids) for row in run.steps),
        closed=len(closed),
        tokens=tokens,
        findings=tuple(findings),
    )


# ---- the ledger -------------------------------------------------------------------------------


def check_steps(run: AuditedRun) -> Iterator[AuditFinding]:
    """Finds steps that the ledger lacks, or has twice or out of order."""
    expected = 1
    for row in run.steps:
        if row.step > expected:
            yield AuditFinding(
                kind=FindingKind.MISSING,
                what=f"steps {expected} to {row.step - 1} have no line in the ledger",
                where=row.where,
                meaning="what they trained on is not known",
            )
        elif row.step < expected:
            yield AuditFinding(
                kind=FindingKind.TRAINED_TWICE,
                what=f"step {row.step} comes after step {expected - 1}",
                where=row.where,
                meaning="two masters wrote this ledger, or a step was run twice",
            )
        expected = row.step + 1


def check_trained_once(run: AuditedRun, closed: Mapping[str, str]) -> Iterator[AuditFinding]:
    """Finds datapoints that were trained twice in an epoch, or trained and left out of it."""
    first: dict[str, tuple[int, str]] = {}
    for row in run.steps:
        for id in row.ids:
            if id in first:
                step, where = first[id]
                yield AuditFinding(
                    kind=FindingKind.TRAINED_TWICE,
                    what=f"datapoint {id} was trained in step {step} and in step {row.step}",
                    where=f"{where} and {row.where}",
                    meaning="it counts twice in its epoch",
                )
            else:
                first[id] = (row.step, row.where)
    for id in sorted(first.keys() & closed.keys()):
        step, where = first[id]
        yield AuditFinding(
            kind=FindingKind.TRAINED_TWICE,
            what=f"datapoint {id} was trained in step {step} and also filtered or set aside",
            where=f"{where} and {closed[id]}",
            meaning="its question was consumed twice",
        )


# ---- deliveries -------------------------------------------------------------------------------


def check_deliveries(index: TicketIndex) -> Iterator[AuditFinding]:
    """Finds trained datapoints that no worker delivered, and deliveries that were accepted twice."""
    run = index.run
    trained: dict[str, TicketRecord] = {}
    for row in run.steps:
        for id, sample in samples_of(row):
            tickets = index.trained_tickets(sample, row.step)
            if (ticket := trained_ticket(tickets)) is not None:
                trained[id] = ticket
                if ticket.end is EpisodeState.DELIVERED and not _in_checkpoint(
                    run, ticket, row.step
                ):
                    yield AuditFinding(
                        kind=FindingKind.NOT_DELIVERED,
                        what=f"step {row.step} of attempt {run.trainer(row.step)} trained {sample}, "
                        f"which attempt {ticket.attempt} took when {ticket.version} steps were trained",
                        where=f"{row.where} and {ticket.where}",
                        meaning=f"it went on from step {run.limits[ticket.attempt]}: the checkpoint "
                        "can't hold the datapoint",
                    )
            elif tickets or _has_all_rows(run, row.step):
                outcome = f"; its worker says {tickets[0].end}" if tickets else ""
                yield AuditFinding(
                    kind=FindingKind.NOT_DELIVERED,
                    what=f"step {row.step} trained {sample}, which no worker delivered{outcome}",
                    where=" and ".join([row.where, *(t.where for t in tickets)]),
                    meaning="it is not known where its tokens come from",
                )
    for id, tickets in index.by_id.items():
        yield from _accepted_twice(index, id, tickets)
        yield from _granted_after_training(index, trained.get(id), tickets)


def _in_checkpoint(run: AuditedRun, ticket: TicketRecord, step: int) -> bool:
    """Returns whether a delivery can have been there for step ``step``, in which it was trained."""
    last = run.limits[ticket.attempt]
    here = ticket.attempt == run.trainer(step)
    return here or last is None or ticket.version is None or ticket.version <= last


def _has_all_rows(run: AuditedRun, step: int) -> bool:
    """Returns whether a delivery for that step must have a line: all attempts so far wrote grants."""
    trainer = run.trainer(step)
    before = [a for a in run.limits if trainer is not None and a <= trainer]
    return bool(before) and run.complete_rows.issuperset(before)


def _accepted_twice(
    index: TicketIndex, id: str, tickets: list[TicketRecord]
) -> Iterator[AuditFinding]:
    accepted = [t for t in tickets if t.end is EpisodeState.DELIVERED and index.decided_in_time(t)]
    by_sample = defaultdict(list)
    for ticket in accepted:
        # What got too stale is made again, under another name.
        by_sample[ticket.sample if index.run.drops_stale else id].append(ticket)
    for name, several in by_sample.items():
        if len(several) > 1:
            workers = ", ".join(f"{t.worker} (attempt {t.attempt})" for t in several)
            yield AuditFinding(
                kind=FindingKind.DELIVERED_TWICE,
                what=f"{name} was delivered and accepted {len(several)} times, by {workers}",
                where=" and ".join(t.where for t in several),
                meaning="the master took the same question twice",
            )


def _granted_after_training(
    index: TicketIndex, source: TicketRecord | None, tickets: list[TicketRecord]
) -> Iterator[AuditFinding]:
    if source is None:
        return
    for ticket in tickets:
        later = _try_of(ticket) > _try_of(source)
        # In a part of its attempt that does not count it may have got too stale, and been made again.
        last = index.run.limits.get(ticket.attempt, 0)
        if later and (last is None or (last > 0 and not index.run.drops_stale)):
            yield AuditFinding(
                kind=FindingKind.DELIVERED_TWICE,
                what=f"{ticket.id} was given out again (try {ticket.try_number}, {ticket.worker}, "
                f"attempt {ticket.attempt}) although try {source.try_number} of attempt "
                f"{source.attempt} was trained",
                where=f"{ticket.where} and {source.where}",
                meaning="the ledger had lost a delivery that it had accepted",
            )


# ---- the bound on staleness -------------------------------------------------------------------


def check_staleness(index: TicketIndex) -> tuple[CheckedTokens, list[AuditFinding]]:
    """Holds the version of each trained token against the bound: step − 1 − version ≤ max_staleness.

    Tokens in the rollout dump each have their version; of others the oldest of the datapoint is in the line
    of its delivery.
    """
    run, found = index.run, list[AuditFinding]()
    of_dump = of_rows = unknown = 0
    if run.max_staleness is None or not run.has_tickets:
        return CheckedTokens(), found
    for row in run.steps:
        for _, sample in samples_of(row):
            ticket = trained_ticket(index.trained_tickets(sample, row.step))
            dumped = _dumped(run, ticket) if ticket is not None else None
            if dumped is not None:
                of_dump += dumped.num_tokens
                oldest, source = dumped.oldest, "rollout_dump"
            elif ticket is not None and ticket.oldest is not None:
                of_rows += ticket.num_tokens
                oldest, source = ticket.oldest, ticket.where
            else:
                unknown += 1
                continue
            if row.step - 1 - oldest > run.max_staleness:
                found.append(
                    AuditFinding(
                        kind=FindingKind.TOO_STALE,
                        what=f"step {row.step} trained {sample}, with tokens of version {oldest}: "
                        f"{row.step - 1 - oldest} steps behind, max_staleness is {run.max_staleness}",
                        where=f"{row.where} and {source}",
                        meaning="the bound on staleness was broken",
                    )
                )
    return CheckedTokens(of_dump=of_dump, of_rows=of_rows, unknown=unknown), found


def _dumped(run: AuditedRun, ticket: TicketRecord) -> SampledVersions | None:
    return run.dumped.get((ticket.attempt, ticket.worker.rpartition("/")[2], ticket.sample))


# ---- nothing is lost --------------------------------------------------------------------------


def closed_questions(index: TicketIndex) -> dict[str, str]:
    """Returns the questions that were filtered or set aside: id → the line that says so."""
    found = {id: row.where for row in index.run.steps for id in row.filtered}
    for ticket in index.run.tickets:
        if ticket.closed and index.decided_in_time(ticket):
            found.setdefault(ticket.id, ticket.where)
    return found


def check_nothing_missing(index: TicketIndex, closed: Mapping[str, str]) -> Iterator[AuditFinding]:
    """Finds questions that were neither trained nor closed although it is their turn no more.

    Questions are given out epoch by epoch. A completed run has trained or closed all that were given out,
    and all of the epochs before the last one of these. Before its end a run that trains in the order of the
    data has done with an epoch when it has trained on the next; others with the last epoch but one.
    """
    run = index.run
    trained = {id for row in run.steps for id in row.ids}
    granted = {t.id: t.where for t in run.tickets if t.attempt in run.limits}
    done = trained | closed.keys()
    found = dict[str, str]()
    if run.is_completed and not run.is_shortened:
        found = {id: granted[id] for id in granted if id not in done}
    seen = done | granted.keys() if run.is_completed else trained
    last_epoch = max((place[0] for id in seen if (place := _place(id))), default=0)
    ended = last_epoch if run.is_completed or run.in_order else last_epoch - 1
    if run.in_epochs and not run.is_shortened:
        size = run.dataset_size or 1 + max(
            (place[1] for id in seen if (place := _place(id))), default=0
        )
        where = run.steps[-1].where if run.steps else ""
        names = (f"{epoch}-{number}" for epoch in range(ended) for number in range(size))
        found |= {id: granted.get(id, where) for id in names if id not in done}
    since = "completed" if run.is_completed else f"in epoch {last_epoch}"
    for id, where in found.items():
        last = max(index.by_id.get(id, ()), key=_try_of, default=None)
        doubt = ", or its worker ended between the master's filtering it and the line about that"
        yield AuditFinding(
            kind=FindingKind.MISSING,
            what=f"question {id} was neither trained nor filtered nor set aside",
            where=where,
            meaning=f"the run is {since}: it was lost{doubt if last and last.end is None else ''}",
        )


def _try_of(ticket: TicketRecord) -> tuple[int, int]:
    """Orders the tickets of a question."""
    return ticket.attempt, ticket.try_number


def _place(id: str) -> tuple[int, int] | None:
    epoch, dash, number = id.partition("-")
    return (int(epoch), int(number)) if dash and epoch.isdecimal() and number.isdecimal() else None


def check_ends(run: AuditedRun) -> Iterator[AuditFinding]:
    """Finds tickets that were granted twice, and ends of tickets that were not granted.

    Each try has a number of its own. A ticket without an end is no finding: its worker or its attempt has
    ended, or still runs (ticket_fates.py).
    """
    first: dict[tuple[int, str], TicketRecord] = {}
    for ticket in run.tickets:
        if ticket.attempt not in run.complete_rows:
            continue
        other = first.setdefault((ticket.attempt, ticket.sample), ticket)
        if other is not ticket:
            yield AuditFinding(
                kind=FindingKind.NO_END,
                what=f"{ticket.sample} was granted twice in attempt {ticket.attempt}, to "
                f"{other.worker} and {ticket.worker}",
                where=f"{other.where} and {ticket.where}",
                meaning="one of the two can't have been ended by the master",
            )
        if not ticket.granted:
            yield AuditFinding(
                kind=FindingKind.NO_END,
                what=f"{ticket.worker} ended {ticket.sample}, which has no line of its grant",
                where=ticket.where,
                meaning="lines of the file are missing",
            )
