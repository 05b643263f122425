"""Reads a trial's folder for an audit: plan, lineage, ledger, rollout workers' lines and dumped versions.

Only files of the folder; no store, no Slurm. What can't be read becomes a finding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.audit.audited_run import (
    AuditedRun,
    AuditFinding,
    FindingKind,
    TicketRecord,
    TrainedStep,
)
from realsys.api.errors import DataError
from realsys.observability.metrics import source_of
from realsys.trial.dump_records import SUFFIX, SampledVersions, dump_records, sampled_versions
from realsys.trial.episode_records import EpisodeState
from realsys.trial.lineage import Lineage
from realsys.trial.liveness import Liveness
from realsys.trial.records import RUN_FILE, PhaseFiles, Result, Resumed, TrialFiles, TrialRecord
from realsys.trial.trial_reader import MAX_ROWS_BYTES, Attempt, TrialReader, check_regular

if TYPE_CHECKING:
    from realsys.api.experiment import ExperimentConfig

PHASE = "main"
_LENGTHS = ("total_train_epochs", "benchmark_steps")  # settings
_KEPT = "kept"  # outcome of a delivered ticket in rollouts/


@dataclass
class AuditReader:
    """Reads one trial.

    Attributes:
        notes: what could not be read, and what is not checked therefore.
    """

    files: TrialFiles
    notes: list[str] = field(default_factory=list)
    unreadable: list[AuditFinding] = field(default_factory=list)

    def read(self) -> AuditedRun:
        """Reads what an audit judges. The ledger comes first: of what it has, the grants are written."""
        reader = TrialReader(self.files)
        attempts = reader.attempts()
        limits = self._limits(reader, attempts)
        steps = tuple(self._steps(limits))
        config = self._config(reader)
        tickets, complete = self._tickets(attempts)
        self.notes += reader.notes
        run = AuditedRun(
            limits=limits,
            tickets=tuple(tickets),
            steps=steps,
            has_tickets=bool(config.rollout_worker) if config else bool(tickets),
            complete_rows=frozenset(complete),
            dataset_size=self._dataset_size(),
            # Without a plan its policy is not known: what any policy may do is no finding.
            drops_stale=config is None,
            in_order=not tickets,
            in_epochs=config is None or config.curriculum is None,
            is_shortened=self._is_shortened(reader),
            dumped=self._dumped({sample for row in steps for sample in row.samples}),
            is_completed=_is_completed(attempts, limits),
            is_live=_is_live(attempts, limits),
            unreadable=tuple(self.unreadable),
        )
        rollout = config.rollout if config else None
        if rollout is None:
            return run
        return replace(
            run,
            max_staleness=rollout.max_staleness if rollout.trains else None,
            drops_stale=rollout.policy == "drop",
            in_order=rollout.policy == "wait",
        )

    # ---- records ------------------------------------------------------------------------------

    def _limits(self, reader: TrialReader, attempts: tuple[Attempt, ...]) -> dict[int, int | None]:
        """Returns the attempts that the newest goes on from, newest first, with their last steps."""
        resumed = {
            attempt.files.number: found
            for attempt in attempts
            if (found := reader.record(Resumed, attempt.files.resumed(PHASE))) is not None
        }
        known = Lineage.of(resumed).limits
        return dict(known) or {a.files.number: None for a in reversed(attempts)}

    def _config(self, reader: TrialReader) -> ExperimentConfig | None:
        plan = reader.plan
        if plan is None:
            self.notes.append("without its plan the bound on staleness is not checked")
            return None
        return plan.phase(PHASE).config

    def _is_shortened(self, reader: TrialReader) -> bool:
        record = reader.record(TrialRecord, self.files.record)
        changed = (
            {name for change in record.changes for name in change.settings} if record else set()
        )
        return any(name.endswith(_LENGTHS) for name in changed)

    def _dataset_size(self) -> int | None:
        try:
            found = json.loads((self._phase.rollout_dump / RUN_FILE).read_bytes())
            return int(found["dataset_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # of a run without rollout workers; else as many as were seen

    @property
    def _phase(self) -> PhaseFiles:
        return PhaseFiles(self.files.root)

    # ---- lines --------------------------------------------------------------------------------

    def _steps(self, limits: Mapping[int, int | None]) -> Iterator[TrainedStep]:
        for where, row in self._rows(source_of(self._phase, self._phase.ledger, list(limits))):
            step, ids = row.get("step"), row.get("ids")
            if not isinstance(step, int) or not isinstance(ids, list):
                self._unreadable("a line of the ledger without step or ids", where)
                continue
            samples = row.get("samples", ids)
            if len(samples) != len(ids):
                self._unreadable(f"{len(ids)} ids and {len(samples)} samples", where)
                continue
            yield TrainedStep(
                step=step,
                ids=tuple(map(str, ids)),
                samples=tuple(map(str, samples)),
                filtered=tuple(map(str, row.get("filtered", ()))),
                where=where,
            )

    def _tickets(self, attempts: tuple[Attempt, ...]) -> tuple[list[TicketRecord], set[int]]:
        """Reads all attempts' tickets; also returns the attempts of which each grant has a line."""
        tickets, complete = list[TicketRecord](), set[int]()
        for attempt in attempts:
            number, ended = attempt.files.number, self._ended_workers(attempt)
            rows = self._phase.rows_of(number)
            if files := _numbered(rows.episodes):
                complete.add(number)
                for path in files:
                    tickets += self._lives(number, path, ended)
            elif files := _numbered(rows.rollouts):
                self.notes.append(
                    f"attempt {number} has lines of ends only: what it granted is not known"
                )
                for path in files:
                    tickets += self._outcomes(number, path)
            else:
                complete.add(number)  # nothing was granted
        return tickets, complete

    def _ended_workers(self, attempt: Attempt) -> set[tuple[str, int | None]]:
        """Returns workers whose processes have ended so far, as the supervisor says, with their pids; None:
        all processes of that worker."""
        restarts = [row for _, row in self._rows(attempt.files.restarts)]
        left = [row for _, row in self._rows(attempt.files.scaling) if row.get("event") == "left"]
        ended = {(str(row.get("worker")), row.get("pid", 0)) for row in restarts}
        return ended | {(str(row.get("worker")), None) for row in left}

    def _lives(
        self, attempt: int, path: Path, ended: Set[tuple[str, int | None]]
    ) -> Iterator[TicketRecord]:
        """Reads the tickets of one worker, each with its grant and its end."""
        worker, pid = f"rollout_worker/{path.stem}", 0
        running: dict[str, TicketRecord] = {}
        for where, row in self._rows(path):
            try:
                state = EpisodeState(row["state"])
                if state is EpisodeState.STARTED:
                    pid = int(row["pid"])
                    yield from (replace(ticket, is_lost=True) for ticket in running.values())
                    running.clear()
                    continue
                ticket = TicketRecord(
                    attempt=attempt, worker=worker, id=str(row["id"]), try_number=int(row["tries"])
                )
                if state is not EpisodeState.GRANTED:
                    yield _with_end(running.pop(ticket.sample, ticket), state, row, where)
                    continue
                if (twice := running.pop(ticket.sample, None)) is not None:
                    yield twice
                running[ticket.sample] = replace(ticket, granted=where)
            except (KeyError, TypeError, ValueError):
                self._unreadable("a line about a ticket without its fields", where)
        is_lost = not ended.isdisjoint({(worker, pid), (worker, None)})
        yield from (replace(ticket, is_lost=is_lost) for ticket in running.values())

    def _outcomes(self, attempt: int, path: Path) -> Iterator[TicketRecord]:
        """Reads the tickets of a worker that wrote their ends only."""
        for where, row in self._rows(path):
            try:
                outcome = row["outcome"]
                state = EpisodeState.DELIVERED if outcome == _KEPT else EpisodeState(outcome)
                ticket = TicketRecord(
                    attempt=attempt,
                    worker=f"rollout_worker/{path.stem}",
                    id=str(row["id"]),
                    try_number=int(row["tries"]),
                    closed=state is EpisodeState.FILTERED,
                )
                tokens = sum(row.get("answer_lengths", ()))
                yield _with_end(ticket, state, {**row, "tokens": tokens}, where)
            except (KeyError, TypeError, ValueError):
                self._unreadable("a line about a ticket without its fields", where)

    def _rows(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields place and content of each line; a torn last one is left out."""
        name = path.relative_to(self.files.root)
        try:
            check_regular(path, max_bytes=MAX_ROWS_BYTES)
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    where = f"{name}:{number}"
                    row = _object(line)
                    if row is not None:
                        yield where, row
                    elif line.endswith(b"\n") and line.strip():
                        self._unreadable("a damaged line", where)
        except FileNotFoundError:
            return
        except OSError as error:
            self._unreadable(f"it can't be read: {error.strerror}", str(name))

    # ---- dumped versions ----------------------------------------------------------------------

    def _dumped(self, wanted: set[str]) -> dict[tuple[int, str, str], SampledVersions]:
        """Reads the versions of trained datapoints' tokens, of the newest record of each."""
        found: dict[tuple[int, str, str], SampledVersions] = {}
        for path in sorted(self._phase.rollout_dump.glob(f"*{SUFFIX}")):
            attempt, _, rest = path.stem.partition("-")
            worker = rest.partition("-")[0]
            if not attempt.isdecimal() or not worker.isdecimal():
                continue
            try:
                for record in dump_records(path):
                    (sample, *_) = record.header.meta.ids
                    if sample in wanted and (versions := sampled_versions(path, record)):
                        found[int(attempt), str(int(worker)), sample] = versions
            except (DataError, OSError) as error:
                what = error.what if isinstance(error, DataError) else str(error)
                self._unreadable(what, str(path.relative_to(self.files.root)))
        return found

    def _unreadable(self, what: str, where: str) -> None:
        self.unreadable.append(
            AuditFinding(
                kind=FindingKind.UNREADABLE,
                what=what,
                where=where,
                meaning="the file was damaged or changed: what it said is not known",
            )
        )


def _with_end(
    ticket: TicketRecord, state: EpisodeState, row: Mapping[str, Any], where: str
) -> TicketRecord:
    oldest, version = row.get("oldest"), row.get("version")
    return replace(
        ticket,
        ended=where,
        end=state,
        why=str(row.get("why", "")),
        closed=ticket.closed or row.get("closed") is True,
        version=None if version is None else int(version),
        oldest=None if oldest is None else int(oldest),
        num_tokens=int(row.get("tokens", 0)),
    )


def _numbered(folder: Path) -> list[Path]:
    """Returns the files of rollout workers in a folder, by their number."""
    found = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return sorted(found, key=lambda path: int(path.stem))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_completed(attempts: tuple[Attempt, ...], limits: Mapping[int, int | None]) -> bool:
    last = attempts[-1] if attempts else None
    if last is None or last.files.number not in limits:
        return False
    return last.marker is not None and last.marker.result is Result.COMPLETED


def _is_live(attempts: tuple[Attempt, ...], limits: Mapping[int, int | None]) -> bool:
    """Returns whether the newest attempt may run: it has no exit marker, and nobody knows it to be gone."""
    last = attempts[-1] if attempts else None
    if last is None or last.marker is not None or last.files.number not in limits:
        return False
    return last.supervisor is not Liveness.DEAD
