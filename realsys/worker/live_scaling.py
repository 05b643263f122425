"""Differences between a live run and its plan: added workers, and draining workers.

One value at the key ``scaling``, changed by `realsys scale`, and by the supervisor when it gives up an
added worker. The supervisor starts added workers and no longer watches draining ones; the master and the
server manager let those finish their work. Names are used once: within an attempt no worker gets the name
of one that left or drains. The next attempt starts with the plan again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from realsys.api.errors import TrialError
from realsys.api.scheduling import SCALED, WorkerType
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import Compare, NameResolve, Put, find
from realsys.trial.records import AttemptRecord, dumps, loads

TRIES = 5  # attempts of a change, while others change it too
LEFT_LATE_S = 15.0  # time that a draining worker has to exit after its deadline


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The name-resolution value. ``attempt`` and ``token`` identify the incarnation it is for.

    Attributes:
        phase: the phase of these workers.
        added: worker → the planned worker with the same configuration.
        drained: worker → seconds to finish its work; then that is reassigned.
    """

    attempt: int
    token: str
    phase: str
    by: str = ""
    at: float = 0.0
    added: Mapping[str, str] = field(default_factory=dict)
    drained: Mapping[str, float] = field(default_factory=dict)

    def with_added(self, added: Mapping[str, str]) -> Scaling:
        """Returns the value with more added workers."""
        return replace(self, added={**self.added, **added})

    def with_drained(self, drained: Mapping[str, float]) -> Scaling:
        """Returns the value with more draining workers; one that drains already may get less time."""
        return replace(self, drained={**self.drained, **drained})


@dataclass
class DrainDeadlines:
    """Draining workers and their deadlines, counted from when *this process* learned of them, on its own
    clock."""

    until_s: dict[str, float] = field(default_factory=dict)

    def update(self, scaling: Scaling, *, now_s: float) -> list[str]:
        """Records new draining workers and returns them."""
        new = [worker for worker in scaling.drained if worker not in self.until_s]
        for worker, seconds in scaling.drained.items():
            self.until_s[worker] = min(now_s + seconds, self.until_s.get(worker, float("inf")))
        return new

    def __contains__(self, worker: object) -> bool:
        return worker in self.until_s

    def overdue(self, *, now_s: float, slack_s: float = 0.0) -> list[str]:
        """Returns the workers whose deadline passed at least ``slack_s`` ago."""
        return [worker for worker, end_s in self.until_s.items() if now_s >= end_s + slack_s]


def is_scaled(worker: str) -> bool:
    """Returns whether workers such as ``rollout_worker/1`` may be added and removed during a run."""
    return worker.partition("/")[0] in SCALED


def index_of(worker: str) -> int:
    """Returns 3 for ``rollout_worker/3``."""
    return int(worker.rpartition("/")[2])


def next_index(kind: WorkerType, *, planned: int, scaling: Scaling) -> int:
    """Returns the first index that no worker of a type has or had in this attempt.

    Args:
        planned: number of workers of that type in the plan.
    """
    added = [index_of(w) for w in scaling.added if w.startswith(f"{kind.value}/")]
    return max(added, default=planned - 1) + 1


def read_scaling(
    store: NameResolve, keys: TrialKeys, *, token: str, phase: str = ""
) -> Scaling | None:
    """Reads the value for one attempt (and phase, if given); None if there is none.

    Raises:
        StoreError: it can't be read. TrialError: it can't be decoded.
    """
    if (entry := find(store, keys.scaling)) is None:
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
    """Applies ``change`` to the present value and writes and returns the result.

    Args:
        change: may be called again, with a value that another process has written meanwhile.
    Raises:
        StoreError: the store did not accept it. TrialError: another attempt runs by now, or other
            writers were always faster. What ``change`` raises.
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
        before, there = None, Compare.absent(keys.scaling)
        if (entry := find(store, keys.scaling)) is not None:
            before = loads(Scaling, entry.value, where=keys.scaling)
            there = Compare.at_revision(keys.scaling, entry.revision)
        if before is None or (before.token, before.phase) != (attempt.token, phase):
            before = Scaling(attempt=attempt.number, token=attempt.token, phase=phase)
        after = change(before)
        conditions = [Compare.at_revision(keys.attempt, fence.revision), there]
        if after == before or store.transaction(conditions, puts=[Put(keys.scaling, dumps(after))]):
            return after
    raise TrialError(
        f"others changed it {TRIES} times meanwhile", where=keys.scaling, fix="try again"
    )
