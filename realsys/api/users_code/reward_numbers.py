"""Reads a number that a user's code gave as a reward: Python's own, or a library's with ``.item()``.

The standard library alone, and nothing of ours: the hosts of users' functions load this file in
interpreters that have no realsys.
"""

from __future__ import annotations

import math
from typing import Any

# In the fork of an answer its code may have put others in their places
_INT, _FLOAT = int, float
_NONE = ", which is not a finite number"
_SHOWN = 100  # characters of a value in messages
_DEPTH = 3  # an array of one object holds a value that may have ``.item()`` itself
_NUMBERS = (
    "biufO"  # kinds of numpy's types that are one, or may be: no text, date, span, complex, record
)


class NoNumber(ValueError):
    """A value is no number to train on; the text says which, of what type, and why not."""


class TooLargeNumber(NoNumber):
    """A value is a whole number that no float holds."""


def finite_number(value: Any) -> float:
    """Returns ``value`` as a float: a number, or what has ``.item()`` (numpy's, torch's, jax's) or
    ``__float__`` (``Decimal``, ``Fraction``).

    Raises:
        NoNumber: it is a text, holds several numbers, is complex, masked, or not finite.
    """
    number = plain_number(value)
    if not math.isfinite(number):
        raise NoNumber(shown_value(value) + _NONE)
    return number


def plain_number(value: Any) -> float:
    """As ``finite_number``, and may be infinite or NaN.

    Raises:
        NoNumber: it is no number.
    """
    return _FLOAT(python_number(value))


def python_number(value: Any) -> int | float:
    """Returns the number that ``value`` is, as an int where it is whole by its type; a float holds it.

    Raises:
        NoNumber: it is no number.
    """
    try:
        found = _inner(value)
        if issubclass(type(found), _INT):
            _FLOAT(found)
            return _INT.__int__(found)
        if issubclass(type(found), _FLOAT):  # also numpy's float64
            return _FLOAT.__float__(found)
        if hasattr(type(found), "__float__") and not _is_text(found):
            return _FLOAT(found)
    except OverflowError as error:
        raise TooLargeNumber(shown_value(value) + ", which is too large for a float") from error
    except (
        Exception
    ) as error:  # several numbers, a tensor without values, a formula, any user's object
        raise NoNumber(f"{shown_value(value)}{_NONE} ({type(error).__name__}: {error})") from error
    raise NoNumber(shown_value(value) + _NONE)


def is_number(value: Any) -> bool:
    """True if ``plain_number`` reads ``value``."""
    try:
        plain_number(value)
    except NoNumber:
        return False
    return True


def shown_value(value: Any) -> str:
    """Returns a value and its type for messages, as ``'1.0', a str``; a long one's type alone."""
    kind = f"a {type(value).__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of any length, or any user's object
        return kind
    if issubclass(type(value), _INT) and len(text) > _SHOWN:
        return kind
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}, {kind}"


def _inner(value: Any) -> Any:
    """Returns what ``.item()`` gives until it gives itself. Raises whatever that does; ValueError: it is no
    number for certain."""
    found = value
    for _ in range(_DEPTH):
        if issubclass(type(found), (_INT, _FLOAT)) or _is_text(found):
            return found
        if _is_masked(found) or getattr(getattr(found, "dtype", None), "kind", "O") not in _NUMBERS:
            raise ValueError("it holds none")
        if getattr(found, "item", None) is None:
            return found
        inner = found.item()
        if type(inner) is type(found):  # a long double of numpy
            return inner
        found = inner
    raise ValueError("its .item() has an .item(), and so on")


def _is_text(value: Any) -> bool:
    return issubclass(
        type(value), (str, bytes, bytearray)
    )  # numpy's, too, which have ``__float__``


def _is_masked(value: Any) -> bool:
    """True for numpy's masked constant, whose ``.item()`` is 0, and an array of it."""
    mask = getattr(value, "mask", None)
    return mask is not None and getattr(mask, "size", 0) == 1 and bool(mask.item())
