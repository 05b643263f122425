"""Parses numbers as people and models write them, in text and in LaTeX, to exact values (pure).

``1,234.50``, ``$18.``, ``\\$5.00``, ``1{,}234``, ``1\\,234``, ``–5``, ``1e3``, ``1.5 \\times 10^3``,
``1 1/2``, ``72%``, ``90^\\circ``, each also in ``**bold**`` or `` `code` ``. A fraction alone (``166/2``)
is not parsed: the caller decides whether it counts as worked out.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_NUMBER = re.compile(rf"([-+]?)(?=[\d.])({_DECIMAL})(?:[eE]([-+]?\d{{1,3}}))?")
_SCIENTIFIC = re.compile(
    rf"([-+]?)(?=[\d.])({_DECIMAL})\s*(?:\\times|\\cdot|[×·*])\s*10\s*(?:\^|\*\*)\s*"
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|(\d|[-+]\d))"
)
_MIXED = re.compile(
    r"([-+]?)(\d{1,9})\s*(?:\s(\d{1,9})\s*/\s*(\d{1,9})|\\[dt]?frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\})"
)
MAX_DIGITS = 1000  # of a whole number
_NEAR = 60  # characters before the last digit of a text that may belong to its number
# In prose: ``1 1/2`` in ``it took 1 1/2 hours``, both numbers of ``5-7``, 1000 for ``1e3``.
NUMBERS = re.compile(
    r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?![\w.]))?(?:(?:\s\d+)?/\d+(?![\d/]|\.\d))?%?"
)
_PARTS = frozenset("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞")
DENIED = re.compile(
    r"(?:\bnot|n't|n’t|≠|\\neq?|!=)\s{0,2}(?:equal\s(?:to\s)?)?[\s$*\"']{0,3}$", re.IGNORECASE
)
UNWORKED = re.compile(
    r"[\d)\]}] ?(?:[-+*×·÷/^−–]|\*\*) ?[$(]?$|\d[:.]$|\b(?:minus|plus|times|divided by) \$?$",
    re.IGNORECASE,
)
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALE = re.compile(r"\s(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_MINUS = re.compile(r"(?<![\w)\]}])[\u2012\u2013\u2014]\s*(?=[\d.$\\])")
_SPACED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,;:! ]|~|[\u00a0\u2007\u2009\u202f])(?=\d{3}(?!\d))")
SPACED_WHOLE = re.compile(r"[-+]?\d{1,3}(?: \d{3})+")
_DOLLAR = re.compile(r"\\\$\s*(?=[-+]?[\d.])")
_PRICE = re.compile(r"\$\s?(?=\d)")
_AMOUNT = re.compile(r"\s?\d[\d,.]*+(?=[\s;:!?)*]|$)")
_EMPHASIS = re.compile(r"(\*\*|__|\*|`+)(?=\S)([^*`]+?)(?<=\S)\1")
_DEGREES = re.compile(r"([-+]?[\d.,]+)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degrees?)\s*\.?")


@dataclass(frozen=True)
class PlainNumber:
    """A parsed value; ``is_percent``: the value of ``72%`` is 72."""

    value: Fraction
    is_percent: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the value is an integer."""
        return self.value.denominator == 1

    def equals(self, other: PlainNumber) -> bool:
        """True for equal values. A percentage equals its number and its share: 72% equals 72 and 0.72.

        Questions for a percentage are answered in both ways, also in data sets.
        """
        if self.is_percent == other.is_percent:
            return self.value == other.value
        percent, bare = (self, other) if self.is_percent else (other, self)
        return bare.value in (percent.value, percent.value / 100)


def plain_number(text: str) -> PlainNumber | None:
    """Parses ``text``, after ``tidy``, as a single number; None if it is anything else."""
    if text.isdecimal() and text.isascii():
        return PlainNumber(Fraction(int(text))) if len(text) <= MAX_DIGITS else None
    text = text.strip().removesuffix(".").strip("$ ")
    is_percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    value = _value(text)
    return None if value is None else PlainNumber(value, is_percent)


def _value(text: str) -> Fraction | None:
    if not any(c.isdigit() for c in text):
        return None
    if found := _NUMBER.fullmatch(text):
        sign, digits, exponent = found.groups()
        return _scaled(sign, digits, exponent or "0")
    if found := _SCIENTIFIC.fullmatch(text):
        sign, digits, in_braces, bare = found.groups()
        return _scaled(sign, digits, in_braces or bare)
    if found := _MIXED.fullmatch(text):
        sign, whole, *parts = found.groups()
        above, below = (int(part) for part in parts if part is not None)
        if not 0 < above < below:  # 1 2/2 is not evaluated
            return None
        value = int(whole) + Fraction(above, below)
        return -value if sign == "-" else value
    return None


def _scaled(sign: str, digits: str, exponent: str) -> Fraction:
    value = Fraction(Decimal(digits.replace(",", ""))) * Fraction(10) ** int(exponent)
    return -value if sign == "-" else value


def tidy(text: str) -> str:
    """Returns ``text`` with its numbers spelt plainly, without changing their meaning.

    For final values, which are short: the time may grow with the square of the length.
    """
    text = text.strip()
    if text.isdecimal() and text.isascii():
        return text
    text = text.replace("\u2212", "-").replace("\\%", "%")
    if SPACED_WHOLE.fullmatch(text):
        text = text.replace(" ", "")
    text = _MINUS.sub("-", text)
    text = _SPACED.sub("", text)
    text = _DOLLAR.sub("", text)
    text = _EMPHASIS.sub(r"\2", text)
    if has_prices(text):
        text = _PRICE.sub("", text)
    if found := _DEGREES.fullmatch(text.strip("$ ")):
        text = found[1]
    return text.strip()


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Returns the last match of a pattern in a text."""
    return next(iter(collections.deque(pattern.finditer(text), maxlen=1)), None)


def is_unstated(text: str, number: re.Match[str]) -> bool:
    """True if prose doesn't state ``number``: "not 5", or a part of ``10 - 5``, ``1:5`` or ``2.3.5``."""
    before = text[max(0, number.start() - 30) : number.start()]
    is_signed = number[0][0] in "+-"
    return bool(DENIED.search(before) or UNWORKED.search(before)) or (
        is_signed and before.rstrip(" ")[-1:].isdecimal()
    )


def has_prices(text: str) -> bool:
    """True if all dollar signs are those of amounts, ``$5``, not LaTeX's."""
    return all(map(_AMOUNT.match, text.split("$")[1:]))


def last_number(text: str) -> PlainNumber | None:
    """Returns the last number in prose, with the scale behind it: 5,000,000 for ``5 million``.

    None if there is none, or if it isn't stated: ``it is not 5``, ``10 - 5``.
    """
    end = len(text)
    while end > 0 and not text[end - 1].isdecimal():
        end -= 1
    if not end:
        return None
    text = text[max(0, end - _NEAR) :]
    if not text.isascii() or "\\" in text or "~" in text or "{," in text:
        text = _SPACED.sub("", _MINUS.sub("-", text.replace("\u2212", "-")))
    last = last_match(NUMBERS, text)
    if last is None or is_unstated(text, last):
        return None
    if text[last.end() : last.end() + 1] in _PARTS:  # 3½
        return None
    number = plain_number(tidy(last[0]))
    if number is not None and (scale := SCALE.match(text, last.end())):
        return PlainNumber(number.value * SCALES[scale[1].lower()], number.is_percent)
    return number
