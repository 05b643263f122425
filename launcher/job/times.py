"""Time limits, begin and deadline of a trial's job: which ones hold, in Slurm's normal form (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from launcher.job.groups import PlacedGroup
from launcher.job.time_spec import (
    Moment,
    TimeLimit,
    deadline_problem,
    limit_text,
    longest,
    parse_begin,
    parse_deadline,
    parse_time_limit,
)
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError

_SITE_LIMIT = "slurm.time_limit in the cluster spec"
_EARLY_S = 60  # man sbatch, --signal: up to so much earlier than asked for
_WORTHWHILE_MIN = 5  # beyond the grace, of a limit that is proposed
Parsed = TypeVar("Parsed", TimeLimit, Moment)


@dataclass(kw_only=True)
class JobTimes:
    """What was read, with what is wrong or surprising in it.

    Attributes:
        own: time limits of groups that name one themselves, by phase and worker type.
        site: the cluster spec's.
    """

    own: dict[tuple[str, str], TimeLimit] = field(default_factory=dict)
    site: TimeLimit | None = None
    begin: Moment | None = None
    deadline: Moment | None = None
    problems: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def limit(
        self, groups: Sequence[PlacedGroup], everyone: Sequence[PlacedGroup]
    ) -> TimeLimit | None:
        """Of a component: the longest of its groups; of all groups when its own name none.

        A group without a limit of its own, and without the site's, may run as long as the others.
        """
        return self._longest(groups) or self._longest(everyone)

    def of_step(self, group: PlacedGroup, limit: TimeLimit | None) -> str | None:
        """A group's own limit where it is shorter than its component's."""
        own = self.own.get((group.phase, group.kind))
        if own is None or own.minutes is None or limit is None:
            return None
        return own.text if limit.minutes is None or own.minutes < limit.minutes else None

    def _longest(self, groups: Sequence[PlacedGroup]) -> TimeLimit | None:
        limits = [self.own.get((g.phase, g.kind), self.site) for g in groups]
        return longest(limit for limit in limits if limit is not None)

    def _read(self, parse: Callable[[], Parsed], where: str) -> Parsed | None:
        try:
            found = parse()
        except ConfigError as error:
            self.problems.append(ConfigError(error.what, where=where, fix=error.fix))
            return None
        if found.warning and found.warning not in self.warnings:
            self.warnings.append(found.warning)
        return found


def job_times(
    groups: Sequence[PlacedGroup],
    cluster: ClusterSpec,
    *,
    begin: str | None,
    deadline: str | None,
    now: datetime,
) -> JobTimes:
    """Everything about time. ``begin`` and ``deadline`` are the launch's own, which win."""
    times = JobTimes()
    if (text := cluster.slurm.time_limit) is not None:
        times.site = times._read(lambda: parse_time_limit(text), _SITE_LIMIT)
    for group in groups:
        if (own := group.task.time_limit) is not None:
            where = group.where("time_limit")
            if limit := times._read(lambda own=own: parse_time_limit(own), where):  # type: ignore[misc]
                times.own[group.phase, group.kind] = limit
    begin, where = _agreed("begin", begin, groups, times.problems)
    if begin is not None:
        times.begin = times._read(lambda: parse_begin(begin, now=now), where)
    deadline, where = _agreed("deadline", deadline, groups, times.problems)
    if deadline is not None:
        times.deadline = times._read(lambda: parse_deadline(deadline, now=now), where)
    if times.deadline is not None:
        limit = times.limit(groups, groups)
        problem = deadline_problem(times.deadline, times.begin, limit, now=now)
        times.problems += [problem] if problem else []
    return times


def over_the_partition(
    groups: Sequence[PlacedGroup], limit: TimeLimit | None, times: JobTimes
) -> Iterator[ConfigError]:
    """A time limit beyond the partition's: the job would wait for ever (PartitionTimeLimit)."""
    partition = groups[0].partition
    if limit is None or partition is None or partition.max_time is None:
        return
    try:
        most = parse_time_limit(partition.max_time)
    except ConfigError as error:
        where = f"partitions.{groups[0].task.partition}.max_time in the cluster spec"
        yield ConfigError(error.what, where=where, fix=error.fix)
        return
    if most.minutes is None or (limit.minutes is not None and limit.minutes <= most.minutes):
        return
    own = [g for g in groups if times.own.get((g.phase, g.kind)) == limit]
    yield ConfigError(
        f"time limit {limit.text}, partition {groups[0].task.partition!r} allows {most.text}",
        where=own[0].where("time_limit") if own else _SITE_LIMIT,
        fix=f"ask for {most.text} or less, or choose another partition",
    )


@dataclass(frozen=True)
class HoldingLimit:
    """The time limit that Slurm will hold a component to, and whose it is. ``limit`` None: not known."""

    limit: TimeLimit | None
    whose: str

    @property
    def is_silent(self) -> bool:
        """Nobody asked for it: the partition's own is taken."""
        return self.whose != _ASKED_FOR

    @property
    def words(self) -> str:
        """``00:05:00 (5 min), the partition's DefaultTime: none was asked for``."""
        if self.limit is None:
            return self.whose
        return f"{self.limit.text} ({self.limit.words})" + (f", {self.whose}" * self.is_silent)


_ASKED_FOR = "asked for"


def holding_limit(asked_for: str | None, partition: PartitionSpec | None) -> HoldingLimit:
    """Of a component: what was asked for, else what the partition gives (as far as the site file says)."""
    if asked_for is not None:
        return HoldingLimit(parse_time_limit(asked_for), _ASKED_FOR)
    for option, name in (("default_time", "DefaultTime"), ("max_time", "MaxTime")):
        text = getattr(partition, option, None)
        if text is not None:
            own = f"the partition's {name}: none was asked for"
            return HoldingLimit(parse_time_limit(text), own)
    return HoldingLimit(None, "the partition's own: none was asked for")


def time_to_run(
    groups: Sequence[PlacedGroup], limit: TimeLimit | None, times: JobTimes, grace_s: int
) -> Iterator[ConfigError]:
    """A limit that leaves no time before the run is told to save; a silent one is warned about."""
    partition, name = groups[0].partition, groups[0].task.partition
    try:
        holds = holding_limit(limit.text if limit else None, partition)
    except ConfigError:
        return  # a wrong text in the site file: reported there
    minutes = holds.limit.minutes if holds.limit else None
    if minutes is None or holds.limit is None:
        return
    if holds.is_silent and partition is not None and partition.default_time is not None:
        told = f"partition {name!r}: the time limit is {holds.words}; ask for another: --time"
        times.warnings += [told] if told not in times.warnings else []
    left = 60 * minutes - grace_s
    if left <= 0:
        own = [g for g in groups if limit and times.own.get((g.phase, g.kind)) == limit]
        site = f"partitions.{name} in the cluster spec" if holds.is_silent else _SITE_LIMIT
        longer = f"give --time {limit_text(-(-grace_s // 60) + _WORTHWHILE_MIN)} or more"
        yield ConfigError(
            f"a time limit of {holds.words} leaves no time to train: {grace_s} s before it "
            "the run is told to save and end",
            where=own[0].where("time_limit") if own else site,
            fix=f"{limit.warning if limit and limit.warning else longer}, or set "
            "slurm.grace_seconds in the cluster spec to what a step and a checkpoint take",
        )
    elif left <= _EARLY_S:
        told = (
            f"a time limit of {holds.words} leaves little time to train: Slurm tells the run to "
            f"save {grace_s} s before it, and may do so up to {_EARLY_S} s earlier"
        )
        times.warnings += [told] if told not in times.warnings else []


def _agreed(
    name: str, requested: str | None, groups: Sequence[PlacedGroup], problems: list[ConfigError]
) -> tuple[str | None, str]:
    """(text, where) of what the launch wants, else of what all groups want that want anything."""
    if requested is not None:
        return requested, f"--{name}"
    given = [(getattr(g.task, name), g) for g in groups if getattr(g.task, name) is not None]
    different = {text for text, _ in given}
    if len(different) > 1:
        told = "; ".join(f"{text!r} for {group.kind.value}" for text, group in given)
        problems.append(
            ConfigError(
                f"a job has one {name}, its groups want {told}",
                where=", ".join(group.where(name) for _, group in given),
                fix=f"make them equal, or give --{name}",
            )
        )
        return None, ""
    return (given[0][0], given[0][1].where(name)) if given else (None, "")
