"""Determines the effective time limits, begin and deadline of a trial's job, in Slurm's normal form
(pure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TypeVar

from launcher.job.groups import PlacedGroup
from launcher.job.time_spec import (
    SlurmDateTime,
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
_EARLY_S = 60  # man sbatch, --signal: it may arrive up to this much early
_WORTHWHILE_MIN = 5  # minutes beyond the grace time in a proposed limit
Parsed = TypeVar("Parsed", TimeLimit, SlurmDateTime)


@dataclass(kw_only=True)
class JobTimes:
    """The parsed times, with problems and warnings about them.

    Attributes:
        own: time limits of groups that set one, by phase and worker type.
        site: the cluster spec's.
    """

    own: dict[tuple[str, str], TimeLimit] = field(default_factory=dict)
    site: TimeLimit | None = None
    begin: SlurmDateTime | None = None
    deadline: SlurmDateTime | None = None
    problems: list[ConfigError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def limit(
        self, groups: Sequence[PlacedGroup], all_groups: Sequence[PlacedGroup]
    ) -> TimeLimit | None:
        """Returns a component's limit: the longest of its groups, or of all groups if its own set none.

        A group without its own or the site's limit may run as long as the others.
        """
        return self._longest(groups) or self._longest(all_groups)

    def step_limit(self, group: PlacedGroup, limit: TimeLimit | None) -> str | None:
        """Returns a group's own limit if it is shorter than its component's."""
        own = self.own.get((group.phase, group.kind))
        if own is None or own.minutes is None or limit is None:
            return None
        return own.text if limit.minutes is None or own.minutes < limit.minutes else None

    def _longest(self, groups: Sequence[PlacedGroup]) -> TimeLimit | None:
        limits = [self.own.get((g.phase, g.kind), self.site) for g in groups]
        return longest(limit for limit in limits if limit is not None)

    def _read(self, parse: Callable[[str], Parsed], text: str, where: str) -> Parsed | None:
        try:
            found = parse(text)
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
    """Parses and checks all times.

    ``begin`` and ``deadline`` are the launch's own, which take precedence.
    """
    times = JobTimes()
    if (text := cluster.slurm.time_limit) is not None:
        times.site = times._read(parse_time_limit, text, _SITE_LIMIT)
    for group in groups:
        own, where = group.task.time_limit, group.where("time_limit")
        if own is not None and (limit := times._read(parse_time_limit, own, where)):
            times.own[group.phase, group.kind] = limit
    begin, where = _agreed("begin", begin, groups, times.problems)
    if begin is not None:
        times.begin = times._read(partial(parse_begin, now=now), begin, where)
    deadline, where = _agreed("deadline", deadline, groups, times.problems)
    if deadline is not None:
        times.deadline = times._read(partial(parse_deadline, now=now), deadline, where)
    if times.deadline is not None:
        limit = times.limit(groups, groups)
        problem = deadline_problem(times.deadline, times.begin, limit, now=now)
        times.problems += [problem] if problem else []
    return times


def partition_limit_problems(
    groups: Sequence[PlacedGroup], limit: TimeLimit | None, times: JobTimes
) -> Iterator[ConfigError]:
    """Yields a limit beyond the partition's: the job would wait forever (PartitionTimeLimit)."""
    partition = groups[0].partition
    if limit is None or partition is None or partition.max_time is None:
        return
    most = parse_time_limit(partition.max_time)
    if most.minutes is None or (limit.minutes is not None and limit.minutes <= most.minutes):
        return
    own = [g for g in groups if times.own.get((g.phase, g.kind)) == limit]
    yield ConfigError(
        f"time limit {limit.text}, partition {groups[0].task.partition!r} allows {most.text}",
        where=own[0].where("time_limit") if own else _SITE_LIMIT,
        fix=f"request {most.text} or less, or choose another partition",
    )


@dataclass(frozen=True)
class EffectiveLimit:
    """The time limit that Slurm will enforce on a component, and its source. ``limit`` None: unknown."""

    limit: TimeLimit | None
    source: str

    @property
    def is_default(self) -> bool:
        """Whether it is the partition's own, because none was requested."""
        return self.source != _REQUESTED

    @property
    def words(self) -> str:
        """For users: ``00:05:00 (5 min), the partition's DefaultTime: none was requested``."""
        if self.limit is None:
            return self.source
        return f"{self.limit.text} ({self.limit.words})" + (f", {self.source}" * self.is_default)


_REQUESTED = "requested"


def effective_limit(requested: str | None, partition: PartitionSpec | None) -> EffectiveLimit:
    """Returns a component's limit: the requested one, else the partition's as far as the site file states
    it.
    """
    if requested is not None:
        return EffectiveLimit(parse_time_limit(requested), _REQUESTED)
    for option, name in (("default_time", "DefaultTime"), ("max_time", "MaxTime")):
        text = getattr(partition, option, None)
        if text is not None:
            own = f"the partition's {name}: none was requested"
            return EffectiveLimit(parse_time_limit(text), own)
    return EffectiveLimit(None, "the partition's own: none was requested")


def training_time_problems(
    groups: Sequence[PlacedGroup], limit: TimeLimit | None, times: JobTimes, grace_s: int
) -> Iterator[ConfigError]:
    """Yields a limit that leaves no time before Slurm's signal to save; warns of a default limit."""
    partition, name = groups[0].partition, groups[0].task.partition
    try:
        holds = effective_limit(limit.text if limit else None, partition)
    except ConfigError:
        return  # malformed in the site file: reported there
    minutes = holds.limit.minutes if holds.limit else None
    if minutes is None or holds.limit is None:
        return
    if holds.is_default and partition is not None and partition.default_time is not None:
        warning = f"partition {name!r}: the time limit is {holds.words}; set another with --time"
        times.warnings += [warning] if warning not in times.warnings else []
    left = 60 * minutes - grace_s
    if left <= 0:
        own = [g for g in groups if limit and times.own.get((g.phase, g.kind)) == limit]
        site = f"partitions.{name} in the cluster spec" if holds.is_default else _SITE_LIMIT
        longer = f"give --time {limit_text(-(-grace_s // 60) + _WORTHWHILE_MIN)} or more"
        yield ConfigError(
            f"a time limit of {holds.words} leaves no time to train: Slurm signals the run to save and "
            f"end {grace_s} s before it",
            where=own[0].where("time_limit") if own else site,
            fix=f"{limit.warning if limit and limit.warning else longer}, or set "
            "slurm.grace_seconds in the cluster spec to the time of a step and a checkpoint",
        )
    elif left <= _EARLY_S:
        warning = (
            f"a time limit of {holds.words} leaves little time to train: Slurm signals the run to "
            f"save {grace_s} s before it, and may do so up to {_EARLY_S} s earlier"
        )
        times.warnings += [warning] if warning not in times.warnings else []


def _agreed(
    name: str, requested: str | None, groups: Sequence[PlacedGroup], problems: list[ConfigError]
) -> tuple[str | None, str]:
    """Returns (text, where) of the launch's value, else of the value common to all groups that set one."""
    if requested is not None:
        return requested, f"--{name}"
    given = [(getattr(g.task, name), g) for g in groups if getattr(g.task, name) is not None]
    different = {text for text, _ in given}
    if len(different) > 1:
        conflicts = "; ".join(f"{text!r} for {group.kind.value}" for text, group in given)
        problems.append(
            ConfigError(
                f"a job has one {name}, its groups set {conflicts}",
                where=", ".join(group.where(name) for _, group in given),
                fix=f"make them equal, or give --{name}",
            )
        )
        return None, ""
    return (given[0][0], given[0][1].where(name)) if given else (None, "")
