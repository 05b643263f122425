"""Validates scores of reward rules: a finite number, or a RewardError that names the rule and record.

A record for which its rule returns no number is retried once; then it is *set aside*: it is not trained on,
and the run goes on. If there are too many of them, the rule is at fault, and the run ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from realsys.api.errors import RewardError

logger = logging.getLogger(__name__)

NO_SCORE = float("nan")  # value in ``rewards`` of all answers to a record that was set aside
_ALWAYS_ALLOWED, _SHARE_ALLOWED = 8, 0.01
_LARGEST = 3.4e38  # largest float32
_SHOWN = 200  # characters of a prompt in messages


def checked_score(value: Any, *, source: str) -> float:
    """Returns ``value`` as a number that can be trained on.

    Args:
        giver: source of the value, e.g. ``reward rule 'exact'``.
    Raises:
        RewardError: it is not a number, or not finite in float32.
    """
    try:
        # float() would convert text to a number.
        number = float(value) if hasattr(type(value), "__float__") else None
    except Exception as error:  # a tensor with several numbers, or any user object
        raise _not_finite_error(value, source) from error
    if number is None or not math.isfinite(number) or abs(number) > _LARGEST:
        raise _not_finite_error(value, source)
    return number


def score(rule: str, function: Callable[..., float], *, response: str, answer: str) -> float:
    """Calls ``function`` on ``response`` and returns its score; ``rule`` is its name.

    Raises:
        RewardError: it raised, or returned something that is not a finite number.
    """
    source = f"reward rule {rule!r}"
    try:
        value: Any = function(response=response, answer=answer)
    except Exception as error:  # a plug-in may raise anything
        raise exception_error(error, source) from error
    return checked_score(value, source=source)


def exception_error(error: Exception, source: str) -> RewardError:
    """Makes the error for an exception of a rule or an environment."""
    return RewardError(
        f"{source} raised {type(error).__name__}: {error}"[:500],
        where=source,
        fix="correct it, so that it returns a number for every answer; 0 is allowed",
    )


def with_record(error: RewardError, *, id: str, prompt: str) -> RewardError:
    """Returns ``error`` extended by the record that it is about."""
    shown = prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + " …"
    return RewardError(error.what, where=f"{error.where}, record {id}: {shown!r}", fix=error.fix)


def _not_finite_error(value: Any, source: str) -> RewardError:
    return RewardError(
        f"{source} returned {value!r:.100}, a {type(value).__name__}, which is not a finite number",
        where=source,
        fix="make it return a finite number for every answer; 0 is allowed",
    )


def too_many(num_set_aside: int, num_records: int) -> bool:
    """True if so many of the scored records were set aside that the rule is at fault."""
    return num_set_aside > _ALWAYS_ALLOWED + _SHARE_ALLOWED * num_records


class SetAsideRecords:
    """Records that a process has set aside; logs each.

    Attributes:
        ids: ids of these records, in order.
        num_records: number of records scored or set aside.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.num_records = 0

    def score_with_retry(
        self, call: Callable[[], float], *, id: str, prompt: Callable[[], str]
    ) -> float:
        """Returns the result of ``call``, retried once if it raises RewardError; then NO_SCORE.

        Raises:
            RewardError: both calls failed and too many records were set aside.
        """
        try:
            try:
                return call()
            except RewardError:
                return call()
        except RewardError as error:
            named = with_record(error, id=id, prompt=prompt())
            if id not in self.ids:
                self.ids.append(id)
                logger.warning(
                    "record set aside id=%s num=%d why=%s where=%s",
                    id,
                    len(self.ids),
                    named.what,
                    named.where,
                )
            if too_many(len(self.ids), self.num_records):
                raise self.too_many_error(named) from error
            return NO_SCORE

    def too_many_error(self, last: RewardError) -> RewardError:
        """Makes the error that ends the run."""
        return RewardError(
            f"{len(self.ids)} of {self.num_records} records got no reward; the last: {last.what}",
            where=last.where,
            fix=last.fix,
        )
