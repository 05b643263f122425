"""Values that an audit reads of a trial and returns, without any decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from realsys.trial.dump_records import SampledVersions
from realsys.trial.episode_records import EpisodeState


@dataclass(frozen=True, kw_only=True)
class TicketRecord:
    """A ticket of one attempt, as the file of the worker that got it tells.

    Attributes:
        try_number: how often the question was granted before.
        granted, ended: file and line (``rows/0001/episodes/0.jsonl:7``); empty: there is none.
        end: how it ended; None: no line says so.
        closed: its question is not given out again, without having been delivered.
        version: steps trained when the master decided; None: not said.
        is_lost: the worker's process has ended before the ticket had.
    """

    attempt: int
    worker: str
    id: str
    try_number: int
    granted: str = ""
    ended: str = ""
    end: EpisodeState | None = None
    why: str = ""
    closed: bool = False
    version: int | None = None
    oldest: int | None = None
    num_tokens: int = 0
    is_lost: bool = False

    @property
    def sample(self) -> str:
        """Id of its delivery."""
        return f"{self.id}.{self.try_number}" if self.try_number else self.id

    @property
    def where(self) -> str:
        """The last line about it."""
        return self.ended or self.granted


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A line of the ledger. ``samples``: names of the deliveries; ``filtered``: ids that the step consumed
    without training."""

    step: int
    ids: tuple[str, ...]
    samples: tuple[str, ...]
    filtered: tuple[str, ...] = ()
    where: str


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """Everything that an audit judges.

    Attributes:
        limits: attempts that the run consists of, newest first → last step that counts, None for all.
        has_tickets: rollout workers made the datapoints.
        complete_rows: attempts of which each granted ticket has a line; others have lines of ends only.
        max_staleness: None: no bound.
        drops_stale: deliveries that got too stale are thrown away and made again.
        dataset_size: number of questions in an epoch; None: not recorded.
        in_epochs: every question comes once in an epoch, and epochs follow one another.
        in_order: steps train in the order of the data.
        is_shortened: a resume changed how long the run is.
        dumped: (attempt, worker's index, sample) → versions of its tokens.
        is_completed, is_live: of the newest attempt.
        unreadable: what could not be read, as findings.
    """

    limits: Mapping[int, int | None]
    tickets: tuple[TicketRecord, ...] = ()
    steps: tuple[TrainedStep, ...] = ()
    has_tickets: bool = True
    complete_rows: frozenset[int] = frozenset()
    max_staleness: int | None = None
    drops_stale: bool = False
    dataset_size: int | None = None
    in_epochs: bool = True
    in_order: bool = True
    is_shortened: bool = False
    dumped: Mapping[tuple[int, str, str], SampledVersions] = field(default_factory=dict)
    is_completed: bool = False
    is_live: bool = False
    unreadable: tuple[AuditFinding, ...] = ()

    @property
    def newest_attempt(self) -> int:
        """The attempt that goes on, or was the last to; 0 before the first."""
        return max(self.limits, default=0)

    def trainer(self, step: int) -> int | None:
        """Returns the attempt whose step ``step`` counts; None if there is none."""
        fitting = [a for a, last in self.limits.items() if last is None or step <= last]
        return min(fitting, default=None)


class FindingKind(StrEnum):
    """What an audit may find."""

    TRAINED_TWICE = "trained twice"
    DELIVERED_TWICE = "delivered twice"
    NOT_DELIVERED = "not delivered"
    TOO_STALE = "too stale"
    MISSING = "missing"
    NO_END = "no end"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """Something that must not be: what, where (file and line), and what it means."""

    kind: FindingKind
    what: str
    where: str
    meaning: str
