"""How a live run differs from its plan: workers that came later, and workers that are to go.

One value at the key ``scaling``, changed by whoever scales (`realsys scale`; the supervisor, when it gives
up a worker that was added). The supervisor starts who is added and no longer looks after who is to go; the
master and the manager of the servers let those finish what they are at. Names are used once: an attempt
never gives a worker that left, or was to leave, its name back. The next attempt begins with the plan again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from realsys.api.errors import KeyNotFound, TrialError
from realsys.api.scheduling import SCALED, WorkerType
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import Compare, NameResolve, Put
from realsys.trial.records import AttemptRecord, dumps, loads

TRIES = 5  # of a change, while others change it too
LEFT_LATE_S = 15.0  # after its time to finish a worker still has this long to end by itself


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The name-resolution value. ``attempt`` and ``token`` say which incarnation is meant.

    Attributes:
        phase: whose workers these are.
        added: worker → the worker of the plan whose configuration it has.
        drained: worker → seconds that it has to finish what it is at; then that is given out anew.
    """

    attempt: int
    token: str
    phase: str
    by: str = ""
    at: float = 0.0
    added: Mapping[str, str] = field(default_factory=dict)
    drained: Mapping[str, float] = field(default_factory=dict)

    def with_added(self, added: Mapping[str, str]) -> Scaling:
        """The same with more workers."""
        return replace(self, added={**self.added, **added})

    def with_drained(self, drained: Mapping[str, float]) -> Scaling:
        """The same with more workers that are to go; one that was told to already may get less time."""
        return replace(self, drained={**self.drained, **drained})


@dataclass
class DrainDeadlines:
    """Who is to go, and until when each may finish: counted from when *we* heard of it, on our clock."""

    until_s: dict[str, float] = field(default_factory=dict)

    def hear(self, scaling: Scaling, *, now_s: float) -> list[str]:
        """Takes note; returns those that are new."""
        new = [worker for worker in scaling.drained if worker not in self.until_s]
        for worker, seconds in scaling.drained.items():
            self.until_s[worker] = min(now_s + seconds, self.until_s.get(worker, float("inf")))
        return new

    def __contains__(self, worker: object) -> bool:
        return worker in self.until_s

    def overdue(self, *, now_s: float, slack_s: float = 0.0) -> list[str]:
        """Whose time is up, since ``slack_s`` at least."""
        return [worker for worker, end_s in self.until_s.items() if now_s >= end_s + slack_s]


def is_scaled(worker: str) -> bool:
    """Whether workers such as ``rollout_worker/1`` may come and go while a run lives."""
    return worker.partition("/")[0] in SCALED


def index_of(worker: str) -> int:
    """3 of ``rollout_worker/3``."""
    return int(worker.rpartition("/")[2])


def next_index(kind: WorkerType, *, planned: int, scaling: Scaling) -> int:
    """The first index that no worker of a kind has or had in this attempt.

    Args:
        planned: workers of that kind in the plan.
    """
    added = [index_of(w) for w in scaling.added if w.startswith(f"{kind.value}/")]
    return max(added, default=planned - 1) + 1


def read_scaling(
    store: NameResolve, keys: TrialKeys, *, token: str, phase: str = ""
) -> Scaling | None:
    """What is there for one attempt (and phase, if that is named); None: nothing.

    Raises:
        StoreError: it can't be read. TrialError: it can't be understood.
    """
    try:
        entry = store.get(keys.scaling)
    except KeyNotFound:
        return None
    found = loads(Scaling, entry.value, where=keys.scaling)
    return found if found.token == token and phase in ("", found.phase) else None


def change_scaling(
    store: NameResolve,
    keys: TrialKeys,
    attempt: AttemptRecord,
    *,
    phase: str,
    change: Callable[[Scaling], Scaling],
) -> Scaling:
    """Has ``change`` make the next value of what is there now, and writes it; returns it.

    Args:
        change: may be called again, with what somebody else has written meanwhile.
    Raises:
        StoreError: the store did not take it. TrialError: another attempt runs by now, or others are
            always faster. What ``change`` raises.
    """
    for _ in range(TRIES):
        fence = store.get(keys.attempt)
        newest = loads(AttemptRecord, fence.value, where=keys.attempt)
        if (newest.number, newest.token) != (attempt.number, attempt.token):
            raise TrialError(
                f"attempt {newest.number} runs by now, this was meant for {attempt.number}",
                where=keys.scaling,
                fix="try again",
            )
        try:
            entry = store.get(keys.scaling)
            before = loads(Scaling, entry.value, where=keys.scaling)
            there = Compare.at_revision(keys.scaling, entry.revision)
        except KeyNotFound:
            before, there = None, Compare.absent(keys.scaling)
        if before is None or (before.token, before.phase) != (attempt.token, phase):
            before = Scaling(attempt=attempt.number, token=attempt.token, phase=phase)
        after = change(before)
        conditions = [Compare.at_revision(keys.attempt, fence.revision), there]
        if after == before or store.transaction(conditions, puts=[Put(keys.scaling, dumps(after))]):
            return after
    raise TrialError(
        f"others changed it {TRIES} times meanwhile", where=keys.scaling, fix="try again"
    )
