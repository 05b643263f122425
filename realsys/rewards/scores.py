"""Validates scores of reward rules: a finite number, or a RewardError that names the rule and record.

Which records get none is counted in set_aside.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from realsys.api.basics.reward import LARGEST
from realsys.api.errors import RewardError
from realsys.api.users_code.reward_numbers import (
    NoNumber,
    TooLargeNumber,
    finite_number,
    is_number,
    plain_number,
    shown_value,
)
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
    fix = "make it return a finite number for every answer; 0 is allowed"
    try:
        number = finite_number(value)
    except TooLargeNumber:
        number = math.inf
    except NoNumber as error:
        raise AnswerFailure(f"{source} returned {error}", where=source, fix=fix) from error
    if abs(number) > LARGEST:
        raise AnswerFailure(
            f"{source} returned {shown_value(value)}, which is beyond ±{LARGEST:g}, the limit of float32",
            where=source,
            fix="make it return a number of at most that size for every answer, such as 0 to 1",
        )
    return number


def numbers_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns of a user's figures those that are numbers, as floats; a metric is nothing else."""
    return {str(k): plain_number(v) for k, v in figures.items() if is_number(v)}


def exception_error(error: Exception, source: str) -> RewardError:
    """Makes the error for an exception of an environment; of a rule: raised_scores.raised_error."""
    what, where = describe(error, source)
    return RewardError(what, where=where, fix="return a number for every answer; 0 is allowed")


def with_record(error: RewardError, *, id: str, prompt: str) -> RewardError:
    """Returns ``error`` extended by the record that it is about."""
    shown = prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + " …"
    return RewardError(error.what, where=f"{error.where}, record {id}: {shown!r}", fix=error.fix)


def too_many(num_set_aside: int, num_records: int) -> bool:
    """True if so many of the scored records were set aside that the rule is at fault."""
    return num_set_aside > _ALWAYS_ALLOWED + _SHARE_ALLOWED * num_records
