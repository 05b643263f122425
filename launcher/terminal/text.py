"""Formats numbers, durations and times for people (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime

# Control characters (C0 and C1) except tab and line end; bidirectional controls; lone surrogates, as in
# a file name that is not UTF-8.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def visible(text: str) -> str:
    """Makes ``text`` safe for a terminal: removes colours and escapes other control characters as
    ``\\x1b``.
    """
    if text.isprintable():
        return text
    return _UNSEEN.sub(_as_escape, _COLOUR.sub("", text))


def _as_escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def duration(seconds: float | None) -> str:
    """Formats ``8.2 s``, ``3 min 05 s``, ``2 h 07 min``, ``3 d 4 h``."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def times(count: int) -> str:
    """Formats ``1 time``, ``2 times``."""
    return f"{count} time" + "s" * (count != 1)


def listed(names: Iterable[str], most: int) -> str:
    """Formats ``a, b and 3 more``: at most ``most`` names."""
    some = list(names)
    more = f" and {len(some) - most} more" if len(some) > most else ""
    return ", ".join(some[:most]) + more


def moment(at: float | None) -> str:
    """Formats local date and time."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S") if at else ""


def number(value: float) -> str:
    """Formats four significant digits without trailing zeros."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.2e}"


def headline(values: Mapping[str, float]) -> str:
    """Formats ``reward 0.43   KL 0.012``."""
    return "   ".join(f"{name} {number(value)}" for name, value in values.items())
