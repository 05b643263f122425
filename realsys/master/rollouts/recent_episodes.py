"""Decides from the newest episodes of all rollout workers whether a run goes on, waits or ends (pure).

A share of the episodes may fail, although they were played again: more ends the run. While nothing succeeds
at all it is not the episodes' fault but an outage; then nothing counts, and the run waits::

    episodes of a worker, by the time when they began    S S r S S S S r │ r r r r r r r r r … r │ S S r S
                                                         ── counted ──── └ of many records: outage ┘

A success says that all was well when its episode began, not when it ended: episodes that had begun before
an outage still end well in it. So they are in the order of their beginnings, and what is behind a worker's
newest success is not judged yet.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from realsys.api.errors import RolloutError
from realsys.api.worker_configs import FAILED_SHARE, FAILED_WINDOW
from realsys.transport.rollout_messages import FAILED_AGAIN, OUTAGES, EpisodeTry, TryFault

WAIT_LIMIT_S = 1800.0
_HOPELESS = FAILED_AGAIN + 1  # failures of an episode in a row, 21 s after its first
_LEAST_RECORDS = 2  # so many may fail by themselves in any run
_MOST_FAIL = 0.5  # a share, outages included, from which on the patience counts
_NEVER_THERE = "none has in this run so far: an address in its settings may be wrong"
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, order=True, slots=True)
class _EndedEpisode:
    """An episode that got a score, or failed for the FAILED_AGAIN-th time in a row.

    ``at_s``: when it began, or when it failed first.
    """

    at_s: float
    worker: str
    record: str
    failed: bool
    of_servers: bool
    why: str


@dataclass(eq=False, kw_only=True)
class RecentEpisodes:
    """The newest episodes of a run. Times are those of one clock, in seconds.

    Attributes:
        failed_share: most of the ``window`` that may fail although they were played again.
        wait_limit_s: for how long nothing may succeed.
        batch_size: records a step. group_size: episodes a record. at_once: most records that have been
            played at the same time, 0: not known yet.
        has_succeeded: an episode of this run has, in this attempt or before.
    """

    failed_share: float = FAILED_SHARE
    wait_limit_s: float = WAIT_LIMIT_S
    batch_size: int = 1
    group_size: int = 1
    at_once: int = 0
    has_succeeded: bool = False
    _ended: list[_EndedEpisode] = field(default_factory=list)  # in the order of their beginnings
    _newest_s: dict[str, float] = field(default_factory=dict)  # worker → its newest success began
    _stuck: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # worker, record → first failure
    _hopeless: set[str] = field(default_factory=set)  # records, before anything has succeeded
    _untried: set[str] = field(default_factory=set)  # workers that are there and have told nothing
    _failing_since_s: float | None = None  # nothing has succeeded since
    _mostly_since_s: float | None = None  # most have failed since
    _is_outage: bool = False  # at the end of the last report
    _well_s: float = -math.inf  # the first success after the last outage began
    _was_steady: bool = True  # since then most succeeded: another outage may be survived
    _whys: deque[str] = field(default_factory=lambda: deque(maxlen=FAILED_WINDOW))  # since then
    _counts: Counter[str] = field(default_factory=Counter)

    def note(self, worker: str, outcomes: Iterable[EpisodeTry], *, now_s: float) -> None:
        """Takes what a worker tells of tries that ended."""
        self._newest_s.setdefault(worker, -math.inf)
        self._untried.discard(worker)
        for ended in outcomes:
            at_s = now_s - ended.ago_s
            if ended.failures:
                self._failed(worker, ended, at_s, now_s=now_s)
            else:
                self._succeeded(worker, ended.id, at_s)
        self._see_end_of_outage()
        failed, num = self._newest_failures()
        if len(failed) <= _MOST_FAIL * num:
            self._mostly_since_s = None
        elif self._mostly_since_s is None:
            self._mostly_since_s = now_s

    def _see_end_of_outage(self) -> None:
        """Forgets the failures of an outage at the first success after it.

        Not if nothing was steady since the one before: where next to nothing succeeds, each success would
        be such an end.
        """
        began_s = max(self._newest_s.values())
        is_outage = self.nothing_succeeds
        if self._is_outage and not is_outage and self._was_steady and began_s > self._well_s:
            self._well_s, self._was_steady = began_s, False
            self._mostly_since_s = None
        self._is_outage = is_outage
        if not self._was_steady and not is_outage:
            since = [e.failed for e in self._ended[-self.window :] if e.at_s >= self._well_s]
            good = len(since) - sum(since)
            self._was_steady = good > max(
                self._most_by_themselves(1), (1 - _MOST_FAIL) * len(since)
            )

    def _newest_failures(self) -> tuple[list[_EndedEpisode], int]:
        """Returns which of the last episodes failed, and of how many; without failures in an outage,
        be it of one worker, unless nothing succeeds now."""
        newest = self._ended[-self.window :]
        failed = [e for e in newest if e.failed]
        stuck = Counter(at for at, _ in self._stuck)
        most = math.inf if self._is_outage else self._most_by_themselves(len(self._newest_s))
        counted = [e for e in failed if e.at_s >= self._well_s and stuck[e.worker] <= most]
        return counted, len(newest) - len(failed) + len(counted)

    def _succeeded(self, worker: str, record: str, began_s: float) -> None:
        self.has_succeeded = True
        self._hopeless.clear()
        self._failing_since_s = None
        self._whys.clear()
        newest_s = self._newest_s[worker] = max(self._newest_s[worker], began_s)
        self._stuck = {
            (w, r): s
            for (w, r), s in self._stuck.items()
            if w != worker or (s > newest_s and r != record)
        }
        self._keep(_EndedEpisode(began_s, worker, record, False, False, ""))

    def _failed(self, worker: str, ended: EpisodeTry, at_s: float, *, now_s: float) -> None:
        is_outage = ended.fault in OUTAGES
        self._counts["outage_tries" if is_outage else "failed_tries"] += 1
        self._whys.append(ended.why)
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if ended.failures == FAILED_AGAIN:
            of_servers = ended.fault == TryFault.SERVERS
            self._keep(_EndedEpisode(at_s, worker, ended.id, True, of_servers, ended.why))
        may_be_outage = ended.fault != TryFault.DOUBTFUL and at_s > self._newest_s[worker]
        if ended.failures >= FAILED_AGAIN and may_be_outage:
            self._stuck[worker, ended.id] = at_s
        if ended.failures >= _HOPELESS and not is_outage and not self.has_succeeded:
            self._hopeless.add(ended.id)

    def _keep(self, ended: _EndedEpisode) -> None:
        insort(self._ended, ended)
        del self._ended[: -4 * self.window]

    def gave_up(self, worker: str, record: str, why: str, *, now_s: float) -> None:
        """Takes a record that was given up. If no try of it was reported, it failed before any."""
        if not any(e.failed and e.record == record for e in self._ended):
            fault = TryFault.AWAY  # as far as is known
            outcome = EpisodeTry(id=record, ago_s=0.0, failures=_HOPELESS, fault=fault, why=why)
            self.note(worker, [outcome], now_s=now_s)

    def joined(self, worker: str) -> None:
        """Notes a worker that is there and may play."""
        self._untried.add(worker)

    def lost(self, worker: str) -> None:
        """Forgets what a worker that has ended was stuck at."""
        self._untried.discard(worker)
        self._stuck = {key: s for key, s in self._stuck.items() if key[0] != worker}
        self._is_outage = self._is_outage and self.nothing_succeeds  # if it ended, not by a success

    # ---- decisions --------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Episodes that are looked at: FAILED_WINDOW, or those of two steps if these are more."""
        return max(FAILED_WINDOW, 2 * self.batch_size * self.group_size)

    @property
    def nothing_succeeds(self) -> bool:
        """True while more records fail, with no success since at any worker, than could by themselves:
        an outage."""
        newest_s = max(self._newest_s.values(), default=-math.inf)
        records = {record for (_, record), first_s in self._stuck.items() if first_s > newest_s}
        return len(records) > self._most_by_themselves(1)

    @property
    def is_of_one(self) -> bool:
        """True while one worker alone is stuck, and others may play what it gives up that have not played
        anything: it may have taken every record before they asked."""
        return bool(self._untried) and len({worker for worker, _ in self._stuck}) == 1

    def nothing_succeeds_at(self, worker: str) -> bool:
        """True while nothing succeeds anywhere, or nothing at a worker: its node may be at fault."""
        stuck = sum(at == worker for at, _ in self._stuck)
        return self.nothing_succeeds or stuck > self._most_by_themselves(len(self._newest_s))

    def _most_by_themselves(self, num_workers: int) -> float:
        """Records of a step, at one of ``num_workers``, that may fail without its being an outage; less
        than all that are played at a time."""
        most = self.failed_share * self.batch_size
        if self.at_once:
            most = min(most, self.at_once - 1)
        return max(_LEAST_RECORDS, most / max(1, num_workers))

    def share(self) -> float:
        """Share of the ``window`` that failed although they were played again."""
        return sum(e.failed for e in self._counted()) / self.window

    def _counted(self) -> list[_EndedEpisode]:
        """The last episodes, up to each worker's newest success, without those of outages; none if
        none of them failed."""
        if not any(e.failed for e in self._ended):
            return []
        found: list[_EndedEpisode] = []
        most = self._most_by_themselves(len(self._newest_s))
        rows: defaultdict[str, list[_EndedEpisode]] = defaultdict(list)
        for ended in self._ended:
            if ended.at_s <= self._newest_s[ended.worker]:
                rows[ended.worker].append(ended)
        for row in rows.values():
            for failed, run in groupby(row, key=lambda e: e.failed):
                together = list(run)
                if not failed or len({e.record for e in together}) <= most:
                    found += [e for e in together if not e.of_servers]
        return sorted(found, key=lambda e: e.at_s)[-self.window :]

    def waits(self, *, now_s: float) -> str:
        """Says since when nothing has succeeded, and why; empty if the run does not wait for that."""
        if not self.nothing_succeeds or self._failing_since_s is None:
            return ""
        minutes = (now_s - self._failing_since_s) / 60
        text = f"no episode has succeeded for {minutes:.0f} min: {_most_frequent(self._whys)}"
        return text if self.has_succeeded else f"{text}; {_NEVER_THERE}"

    def begin_to_wait(self, *, now_s: float) -> None:
        """Lets the patience begin anew: a step waits from now on.

        Before, perhaps nothing was played, as in a long train step; that is no outage.
        """
        if self._failing_since_s is not None:
            self._failing_since_s = now_s
        if self._mostly_since_s is not None:
            self._mostly_since_s = now_s

    def fault(
        self, *, now_s: float, in_flight: Collection[str] = (), is_awaited: bool = True
    ) -> RolloutError | None:
        """Returns why the run must end; None: it goes on. Takes long: not for each report.

        Args:
            in_flight: records that are played now.
            is_awaited: a step waits for its batch; else the patience does not end.
        """
        counted = self._counted()
        if (num := sum(e.failed for e in counted)) > self.failed_share * self.window:
            return _error(
                f"{num} of the last {len(counted)} episodes failed although they were played again; "
                f"of {self.window} at most {self.failed_share:.0%} may",
                [e.why for e in counted if e.failed],
                "or raise schedule.failed_share; ",
            )
        is_hopeless = in_flight and self._hopeless.issuperset(in_flight)
        if not self.has_succeeded and is_hopeless and not self.is_of_one:
            return _error(
                f"no episode has succeeded: of all {len(in_flight)} records that are played, one has "
                f"failed {_HOPELESS} times or more",
                self._whys,
            )
        if not is_awaited:
            return None
        if (minutes := self._minutes_over(self._failing_since_s, now_s)) is not None:
            never = "" if self.has_succeeded else f"; {_NEVER_THERE}"
            return _error(f"no episode has succeeded for {minutes:.0f} min{never}", self._whys)
        if (minutes := self._minutes_over(self._mostly_since_s, now_s)) is not None:
            return _error(
                f"more than {_MOST_FAIL:.0%} of the episodes have failed for {minutes:.0f} min",
                [e.why for e in self._newest_failures()[0]],
            )
        return None

    def _minutes_over(self, since_s: float | None, now_s: float) -> float | None:
        """Returns how long something has lasted if that is more than the patience."""
        if since_s is None or now_s - since_s <= self.wait_limit_s:
            return None
        return (now_s - since_s) / 60

    def metrics(self) -> dict[str, float]:
        """Returns what there is to tell since the last call; nothing if no try has failed."""
        if not self._counts:
            return {}
        row = {
            "failed_tries": float(self._counts["failed_tries"]),
            "outage_tries": float(self._counts["outage_tries"]),
            "failed_share": self.share(),
        }
        self._counts.clear()
        return row


def _most_frequent(whys: Collection[str]) -> str:
    """Returns the most frequent reason, with its number. Those that differ in numbers, as ids, are one."""
    examples = {_NUMBER.sub("0", why): why for why in whys}
    counts = Counter(_NUMBER.sub("0", why) for why in whys)
    if not counts:
        return "nothing was said"
    ((kind, num),) = counts.most_common(1)
    return f"{examples[kind]} ({num} of {counts.total()} failures)"


def _error(what: str, whys: Sequence[str] | deque[str], else_: str = "") -> RolloutError:
    return RolloutError(
        f"{what}. Most often: {_most_frequent(whys)}",
        where="rollouts",
        fix=f"mend what it names, {else_}see realsys logs TRIAL rollout_worker; then realsys resume",
    )
