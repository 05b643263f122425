"""Parses Slurm's formats for --time, --begin and --deadline as Slurm does (pure).

A value is normalised and echoed in words, so that a user notices that ``1:30`` is a minute and a half
before it kills a run. Times are local times of the launching host, as for sbatch. Derived from man sbatch
and measured with 22.05; tests/slurm/test_slurm_grammars.py compares with a real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from launcher.job.slurm_datetime import parse_datetime, seconds_between
from realsys.api.errors import ConfigError

MAX_MINUTES = 35_791_393  # 68 years; above it 22.05 overflows: 99999-0 became 578 days
_UNLIMITED = ("-1", "infinite", "unlimited", "0")
_LIMIT = re.compile(
    r"(?P<days>\d{1,18})-(?P<dh>\d{0,18})(:(?P<dm>\d{1,18})(:(?P<ds>\d{1,18}))?)?"
    r"|((?P<h>\d{1,18}):(?=\d{1,18}:))?(?P<m>\d{1,18})(:(?P<s>\d{1,18}))?",
    re.ASCII,
)
_WITH_UNIT = re.compile(r"(\d{1,9})\s*(s|sec|m|min|h|hours?|d|days?)", re.ASCII | re.IGNORECASE)
_FORMS = "write minutes, H:MM:SS or DAYS-HH:MM:SS, e.g. 90, 1:30:00, 2-12:00:00"


@dataclass(frozen=True)
class TimeLimit:
    """A time limit. ``minutes`` None: only the partition's."""

    minutes: int | None
    warning: str | None = None

    @property
    def text(self) -> str:
        """For --time."""
        return "UNLIMITED" if self.minutes is None else limit_text(self.minutes)

    @property
    def words(self) -> str:
        """For users."""
        return "no limit" if self.minutes is None else minutes_words(self.minutes)


@dataclass(frozen=True)
class SlurmDateTime:
    """A point in time."""

    at: datetime
    warning: str | None = None

    @property
    def text(self) -> str:
        """Absolute, for --begin and --deadline: ``2026-11-21T16:00:00``."""
        return self.at.isoformat(timespec="seconds")


def parse_time_limit(text: str) -> TimeLimit:
    """Parses --time as sbatch does: seconds are rounded up to a minute, fields are not range-checked.

    Raises:
        ConfigError: sbatch would refuse it.
    """
    if text.lower() in _UNLIMITED:
        return TimeLimit(None)
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a time limit", where="--time", fix=_limit_fix(text))
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    seconds = (
        part["days"] * 86_400
        + (part["dh"] + part["h"]) * 3_600
        + (part["dm"] + part["m"]) * 60
        + part["ds"]
        + part["s"]
    )
    minutes = -(-seconds // 60)
    if minutes == 0:
        return TimeLimit(None)
    if minutes > MAX_MINUTES:
        raise ConfigError(
            f"the time limit {text!r} is too large: Slurm would silently make it another",
            where="--time",
            fix=f"stay below {limit_text(MAX_MINUTES)}, or write UNLIMITED",
        )
    limit = TimeLimit(minutes)
    # M:S reads like hours and minutes to most people.
    if match["days"] is None and match["h"] is None and match["s"] is not None and part["m"] < 60:
        meant = f"{part['m']}:{match['s']}:00"
        warning = (
            f"--time {text} is {part['m']} min {part['s']} s, so {limit.words}; "
            f"for {part['m']} h {part['s']} min write {meant}"
        )
        return TimeLimit(minutes, warning)
    return limit


def limit_text(minutes: int) -> str:
    """Renders Slurm's own spelling: ``1-02:30:00``."""
    days, rest = divmod(minutes, 1_440)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def minutes_words(minutes: int) -> str:
    """Renders ``1 day 2 h 30 min``."""
    days, rest = divmod(minutes, 1_440)
    parts = [f"{days} day{'s' * (days > 1)}"] if days else []
    parts += [f"{rest // 60} h"] if rest >= 60 else []
    parts += [f"{rest % 60} min"] if rest % 60 or not parts else []
    return " ".join(parts)


def longest(limits: Iterable[TimeLimit]) -> TimeLimit | None:
    """Returns the longest limit; None if there is none."""
    return max(
        limits,
        key=lambda limit: float("inf") if limit.minutes is None else limit.minutes,
        default=None,
    )


def parse_begin(text: str, *, now: datetime) -> SlurmDateTime:
    """Parses --begin as sbatch does at ``now`` (local time, no zone); a past one starts at once.

    Raises:
        ConfigError: sbatch would refuse it.
    """
    at = parse_datetime(text, now=now, where="--begin")
    past = f"--begin {text} is in the past: the job may start at once" if at < now else None
    if text.strip().lower() == "now":
        past = None
    return SlurmDateTime(at, past)


def parse_deadline(text: str, *, now: datetime) -> SlurmDateTime:
    """Parses --deadline as sbatch does at ``now``.

    Raises:
        ConfigError: sbatch would refuse it, or it is past (Slurm's message is "time limit is invalid").
    """
    deadline = SlurmDateTime(parse_datetime(text, now=now, where="--deadline"))
    if deadline.at <= now:
        raise ConfigError(
            f"the deadline {text} ({deadline.text}) is in the past",
            where="--deadline",
            fix="give a later one, e.g. now+12hours",
        )
    return deadline


def deadline_problem(
    deadline: SlurmDateTime, begin: SlurmDateTime | None, limit: TimeLimit | None, *, now: datetime
) -> ConfigError | None:
    """Explains why a job could never end before its deadline; Slurm would remove it unstarted."""
    if limit is None or limit.minutes is None:
        return ConfigError(
            "a deadline needs a time limit: Slurm must know whether the job can end before it",
            where="--deadline",
            fix="give --time as well",
        )
    start = SlurmDateTime(max(now, begin.at) if begin else now)
    if seconds_between(start.at, deadline.at) < 60 * limit.minutes:
        return ConfigError(
            f"a job of {limit.words} that starts {start.text} can't end before the deadline "
            f"{deadline.text}",
            where="--deadline, --time and --begin",
            fix="shorten --time, or give a later --deadline",
        )
    return None


def _limit_fix(text: str) -> str:
    """Suggests the correct spelling of ``2h`` and similar."""
    match = _WITH_UNIT.fullmatch(text.strip())
    if match is None:
        return _FORMS
    per_unit = {"s": 1 / 60, "m": 1, "h": 60, "d": 1_440}
    minutes = max(1, round(int(match[1]) * per_unit[match[2][0].lower()]))
    return f"Slurm knows no units: write {limit_text(minutes)}"
