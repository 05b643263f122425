"""Parses dates and times as sbatch does: ``now+2hours``, ``16:00``, ``2026-12-24T18:00`` (pure).

The parts of a value are read from left to right as Slurm's parse_time does: each sets the date, the time
of day, or an offset. A past time of day means tomorrow; a past date without a year means next year. Slurm
does not read time zones; they are refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

from realsys.api.errors import ConfigError

_TIMES = {
    "midnight": time(0),
    "noon": time(12),
    "fika": time(15),
    "teatime": time(16),
}
_UNITS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
_OFFSET = re.compile(r"now\s*([+-])\s*(\d+)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_UTS = re.compile(r"uts(\d+)", re.IGNORECASE | re.ASCII)
_PIECE = re.compile(
    r"\s*(?:"
    r"(?P<iso>\d{4}-\d{2}-\d{2})[Tt -]?"
    r"|(?P<slash>\d{1,2}/\d{1,2}(?:/\d{2}(?!\d))?)-?"
    r"|(?P<dot>\d{1,2}\.\d{1,2}(?:\.\d{2}(?!\d))?)-?"
    r"|(?P<clock>\d{1,2}:\d{2}(?::\d{2})?)\s*(?P<half>[AaPp][Mm]|[AaPp]\.[Mm]\.)?"
    r"|(?P<bare>\d{6}|\d{4})(?![\d:])"
    r"|(?P<word>midnight|noon|fika|teatime|today|tomorrow|[a-z]+)"
    r")",
    re.IGNORECASE | re.ASCII,
)
_FORMS = (
    "write e.g. now+2hours, 16:00, tomorrow, 2026-12-24 or 2026-12-24T18:00 (units in full: seconds, "
    "minutes, hours, days, weeks)"
)


@dataclass
class _Parts:
    day: date | None = None
    clock: time | None = None
    yearless: bool = False


def read_moment(text: str, *, now: datetime, where: str) -> datetime:
    """Parses the value into local time without a zone.

    Raises:
        ConfigError: sbatch would refuse it, or the date does not exist (Slurm reads 02/30 as March 2).
    """
    try:
        return _read(text.strip(), text, now, where)
    except (ValueError, OverflowError, OSError) as error:  # 25:00, a year beyond 9999
        raise _refused(text, where, str(error)) from None


def _read(stripped: str, text: str, now: datetime, where: str) -> datetime:
    if match := _UTS.fullmatch(stripped):
        return datetime.fromtimestamp(int(match[1]))
    if match := _OFFSET.fullmatch(stripped):
        return later(now, _offset_s(match, text, where))
    if stripped.lower() == "now":
        return now
    parts, at = _Parts(), 0
    while at < len(stripped):
        match = _PIECE.match(stripped, at)
        if match is None or match.end() == at:
            raise _refused(text, where)
        _take(match, parts, now, text, where)
        at = match.end()
    if parts.day is None and parts.clock is None:
        raise _refused(text, where)
    return _combined(parts, now)


def later(at: datetime, seconds: float) -> datetime:
    """Adds seconds to a local time without a zone, as Slurm does across daylight-saving changes.

    In the hour that occurs twice in autumn the result is ambiguous, as it is for sbatch.
    """
    return datetime.fromtimestamp(at.timestamp() + seconds)


def seconds_between(begin: datetime, end: datetime) -> float:
    """Computes the elapsed seconds, which daylight-saving changes make differ from the clock times."""
    return end.timestamp() - begin.timestamp()


def _offset_s(match: re.Match[str], text: str, where: str) -> int:
    unit = match[3].lower().removesuffix("s") or "second"
    if unit not in _UNITS:
        near = [u for u in _UNITS if u.startswith(unit)]
        meant = f"; for {near[0]}s write now{match[1]}{match[2]}{near[0]}s" if near else ""
        raise _refused(text, where, f"{match[3]!r} is not one of Slurm's units{meant}")
    seconds = int(match[2]) * _UNITS[unit]
    return seconds if match[1] == "+" else -seconds


def _take(match: re.Match[str], parts: _Parts, now: datetime, text: str, where: str) -> None:
    """Adds one parsed part to ``parts``. Raises ValueError for a date or time that does not exist."""
    if word := match["word"]:
        _take_word(word.lower(), parts, now, text, where)
    elif iso := match["iso"]:
        parts.day, parts.yearless = date(*map(int, iso.split("-"))), False
    elif spelt := match["slash"] or match["dot"] or match["bare"]:
        digits = re.split(r"[/.]", spelt) if match["bare"] is None else re.findall("..", spelt)
        month, day, *year = map(int, digits)
        given = year[0] if year else 0  # Slurm treats year 00 as no year
        parts.day = date(2000 + given if given else now.year, month, day)
        parts.yearless = not given
    else:
        parts.clock = _clock(match["clock"], match["half"])


def _take_word(word: str, parts: _Parts, now: datetime, text: str, where: str) -> None:
    if word in _TIMES:
        parts.clock = _TIMES[word]
    elif word in ("today", "tomorrow"):
        parts.day = now.date() + timedelta(days=word == "tomorrow")
    else:
        zone = " (Slurm reads no time zones: leave it out)" if word == "z" else ""
        raise _refused(text, where, f"Slurm does not know the word {word!r}{zone}")


def _clock(text: str, half: str | None) -> time:
    hour, minute, second = map(int, (text + ":0").split(":")[:3])
    if half:
        if not 1 <= hour <= 12:
            raise ValueError(f"{hour} is not an hour of a 12-hour clock")
        hour = hour % 12 + 12 * half.lower().startswith("p")
    return time(hour, minute, second)


def _combined(parts: _Parts, now: datetime) -> datetime:
    if parts.day is None:
        assert parts.clock is not None
        found = datetime.combine(now.date(), parts.clock)
        return found + timedelta(days=1) if found < now else found
    found = datetime.combine(parts.day, parts.clock or time(0))
    if parts.yearless and found < now:
        return found.replace(year=found.year + 1)
    return found


def _refused(text: str, where: str, why: str = "") -> ConfigError:
    what = f"{text!r} is not a time that Slurm can read" + (f": {why}" if why else "")
    return ConfigError(what, where=where, fix=_FORMS)
