"""Units behind numbers, as answers state them: ``5 cm``, ``12 \\text{ m}^2``, ``60 mph`` (pure).

A unit is read to a dimension and a factor, so that ``500 cm`` is ``5 m``, and ``5 m`` is not ``5 cm``.
Other words behind a number (``12 apples``) say what is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

_TABLE: dict[str, tuple[str, str]] = {
    # names: dimension, factor
    "nm nanometer nanometre": ("length", "1e-9"),
    "µm um micrometer micrometre micron": ("length", "1e-6"),
    "mm millimeter millimetre": ("length", "1e-3"),
    "cm centimeter centimetre": ("length", "1e-2"),
    "dm decimeter decimetre": ("length", "1e-1"),
    "m meter metre": ("length", "1"),
    "km kilometer kilometre": ("length", "1000"),
    "in inch inche": ("length", "0.0254"),
    "ft foot feet": ("length", "0.3048"),
    "yd yard": ("length", "0.9144"),
    "mi mile": ("length", "1609.344"),
    "mg milligram": ("mass", "1e-6"),
    "g gram gm": ("mass", "1e-3"),
    "kg kilogram kilo": ("mass", "1"),
    "t ton tonne": ("mass", "1000"),
    "oz ounce": ("ounce", "1"),
    "lb pound": ("pound", "1"),
    "ms millisecond": ("time", "1e-3"),
    "s sec second": ("time", "1"),
    "min minute": ("time", "60"),
    "h hr hour": ("time", "3600"),
    "day": ("time", "86400"),
    "wk week": ("time", "604800"),
    "month": ("month", "1"),
    "yr year": ("month", "12"),
    "ml milliliter millilitre": ("length^3", "1e-6"),
    "cl centiliter centilitre": ("length^3", "1e-5"),
    "l liter litre": ("length^3", "1e-3"),
    "gal gallon": ("gallon", "1"),
    "qt quart": ("gallon", "0.25"),
    "pt pint": ("gallon", "0.125"),
    "cup": ("gallon", "0.0625"),
    "acre": ("acre", "1"),
    "hectare": ("hectare", "1"),
    "dollar usd buck": ("dollar", "1"),
    "cent penny pennies": ("dollar", "0.01"),
    "euro eur €": ("euro", "1"),
    "sterling gbp": ("sterling", "1"),
    "rupee": ("rupee", "1"),
    "yen": ("yen", "1"),
    "degree deg": ("degree", "1"),
    "radian rad": ("radian", "1"),
    "celsiu": ("celsius", "1"),
    "fahrenheit": ("fahrenheit", "1"),
    "n newton": ("newton", "1"),
    "j joule": ("joule", "1"),
    "kj kilojoule": ("joule", "1000"),
    "w watt": ("watt", "1"),
    "kw kilowatt": ("watt", "1000"),
    "v volt": ("volt", "1"),
    "hz hertz": ("hertz", "1"),
    "mph": ("length time^-1", "0.44704"),
    "kph kmh kmph": ("length time^-1", "5/18"),
}
_UNITS = {
    name: (dimension, Fraction(factor))
    for names, (dimension, factor) in _TABLE.items()
    for name in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_ANY = {"unit"}  # "12 units", "square units": says nothing that could clash
_SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
UNIT_TOKENS = re.compile(r"[a-zµ]+|\^|-?\d+|[/·*]")
NO_UNIT = re.compile(
    r"(?<![\^-])\d|\b(?:or|and|not|minus|plus|times|less|than|between|over|divided|least|most|if|but|except)\b"
)
_ARTICLES = {"a", "an", "the", "of", "in", "is", "are", "more", "total", "about", "each"}


@dataclass(frozen=True)
class AnswerUnit:
    """What stands behind a number.

    Attributes:
        dimensions: powers of the dimensions, sorted; None: words that are no unit.
        factor: of the unit in the dimension's first one.
        words: what is counted, in lower case and singular.
        scale: a million, of ``5 million dollars``.
    """

    dimensions: tuple[tuple[str, int], ...] | None = None
    factor: Fraction = Fraction(1)
    words: frozenset[str] = frozenset()
    scale: int = 1
    is_any: bool = False

    def agrees(self, other: AnswerUnit) -> bool:
        """True if both may be said of one quantity: equal dimensions, or a word in common."""
        if self.is_any or other.is_any:
            return True
        if self.dimensions is not None and other.dimensions is not None:
            mine, others = _loose(self.dimensions), _loose(other.dimensions)
            return mine == others
        if self.words and other.words:
            return bool(self.words & other.words)
        return not (self.words or self.dimensions) or not (other.words or other.dimensions)


def _loose(dimensions: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Degrees may be of any kind: 20 degrees are 20 °C."""
    warm = {(("celsius", 1),), (("fahrenheit", 1),)}
    return (("degree", 1),) if dimensions in warm else dimensions


def singular(word: str) -> str:
    """Returns ``apple`` for ``apples``."""
    return word[:-1] if len(word) > 2 and word.endswith("s") and word != "celsius" else word


def is_unit(word: str) -> bool:
    """True for a name of a unit, or of a scale (``million``)."""
    word = word.lower()
    return (
        word in _UNITS
        or singular(word) in _UNITS
        or word in _POWERS
        or singular(word) in _SCALES
        or word in ("per", "percent", "am", "pm")
    )


def unit_of(text: str) -> AnswerUnit:
    """Parses the words behind a number; powers are written ``cm^2``."""
    lowered = text.lower()
    tokens = UNIT_TOKENS.findall(lowered)
    scale = 1
    while tokens and singular(tokens[0]) in _SCALES:
        scale *= _SCALES[singular(tokens[0])]
        tokens = tokens[1:]
    words = frozenset(
        singular(token) for token in tokens if token.isalpha() and token not in _ARTICLES
    )
    if words and words <= {*_ANY, *_POWERS}:
        return AnswerUnit(scale=scale, is_any=True)
    if read := _dimensions(tokens):
        powers, factor = read
        return AnswerUnit(tuple(sorted(powers.items())), factor, words, scale)
    return AnswerUnit(words=words, scale=scale)


def _dimensions(tokens: Iterable[str]) -> tuple[dict[str, int], Fraction] | None:
    """Reads units up to the first word that is none; None if the first one is none."""
    powers: dict[str, int] = {}
    factor = Fraction(1)
    sign, power, last = 1, 1, None
    is_power = False
    for token in tokens:
        if token == "^":
            is_power = last is not None
        elif is_power and token.lstrip("-").isdigit() and last and len(token) < 3:
            more = (int(token) - 1) * last[1]
            dimension, step = last[0], last[2]
            for name, count in dimension:
                powers[name] = powers.get(name, 0) + count * more
            factor *= step**more
            is_power, last = False, None
        elif token in ("/", "per"):
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif token in ("squared", "cubed") and last:
            more = (1 if token == "squared" else 2) * last[1]
            for name, count in last[0]:
                powers[name] = powers.get(name, 0) + count * more
            factor *= last[2] ** more
            last = None
        elif found := _UNITS.get(token) or _UNITS.get(singular(token)):
            dimension = _parts(found[0])
            if {"degree"} == set(powers) and found[0] in ("celsius", "fahrenheit"):
                powers.clear()
            for name, count in dimension:
                powers[name] = powers.get(name, 0) + count * power * sign
            factor *= found[1] ** (power * sign)
            last = (dimension, sign, found[1])
            power = sign = 1
        elif token.isalpha() and token not in ("c", "f"):
            break
        elif token in ("c", "f") and set(powers) == {"degree"}:
            powers = {"celsius" if token == "c" else "fahrenheit": 1}
    if not powers:
        return None
    return {name: count for name, count in powers.items() if count}, factor


def _parts(dimension: str) -> list[tuple[str, int]]:
    pairs = (part.partition("^") for part in dimension.split())
    return [(name, int(power or 1)) for name, _, power in pairs]
