"""Validates scores of reward rules: a finite number, or a RewardError that names the rule and record.

Which records get none is counted in set_aside.py.
"""

from __future__ import annotations

import math
from typing import Any

from realsys.api.basics.reward import LARGEST
from realsys.api.errors import RewardError
from realsys.rewards.raised_scores import AnswerFailure, describe

NO_SCORE = float("nan")  # value in ``rewards`` of all answers to a record that was set aside
_ALWAYS_ALLOWED, _SHARE_ALLOWED = 8, 0.01
_SHOWN = 200  # characters of a prompt in messages


def checked_score(value: Any, *, source: str) -> float:
    """Returns ``value`` as a number that can be trained on.

    Args:
        source: of the value, e.g. ``reward rule 'exact'``.
    Raises:
        RewardError: it is not a number, or not finite in float32.
    """
    try:
        # float() would convert text to a number.
        number = float(value) if hasattr(type(value), "__float__") else None
    except OverflowError as error:  # a whole number that no float holds
        raise _too_large_error(value, source) from error
    except Exception as error:  # a tensor with several numbers, or any user object
        raise _not_finite_error(value, source) from error
    if number is None or not math.isfinite(number):
        raise _not_finite_error(value, source)
    if abs(number) > LARGEST:
        raise _too_large_error(value, source)
    return number


def exception_error(error: Exception, source: str) -> RewardError:
    """Makes the error for an exception of an environment; of a rule: raised_scores.raised_error."""
    what, where = describe(error, source)
    return RewardError(what, where=where, fix="return a number for every answer; 0 is allowed")


def with_record(error: RewardError, *, id: str, prompt: str) -> RewardError:
    """Returns ``error`` extended by the record that it is about."""
    shown = prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + " …"
    return RewardError(error.what, where=f"{error.where}, record {id}: {shown!r}", fix=error.fix)


def _not_finite_error(value: Any, source: str) -> RewardError:
    return AnswerFailure(
        f"{source} returned {value!r:.100}, a {type(value).__name__}, which is not a finite number",
        where=source,
        fix="make it return a finite number for every answer; 0 is allowed",
    )


def _too_large_error(value: Any, source: str) -> RewardError:
    kind = f"a {type(value).__name__}"
    shown = f"{value!r}, {kind}" if isinstance(value, float) else kind  # an int may have any length
    return AnswerFailure(
        f"{source} returned {shown}, which is beyond ±{LARGEST:g}, the limit of float32",
        where=source,
        fix="make it return a number of at most that size for every answer, such as 0 to 1",
    )


def too_many(num_set_aside: int, num_records: int) -> bool:
    """True if so many of the scored records were set aside that the rule is at fault."""
    return num_set_aside > _ALWAYS_ALLOWED + _SHARE_ALLOWED * num_records
