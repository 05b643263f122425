"""What a reward rule says of an answer, checked: a finite number, or a RewardError that names what failed.

A record for which its rule gives no number is tried once more; then it is *set aside*: nothing is learned
from it, and the run goes on. When there are too many of them, the rule is at fault, and the run ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from realsys.api.errors import RewardError

logger = logging.getLogger(__name__)

NO_SCORE = float("nan")  # in ``rewards``, of all answers to a record that was set aside
_ALWAYS_ALLOWED, _SHARE_ALLOWED = 8, 0.01
_LARGEST = 3.4e38  # float32's
_SHOWN = 200  # characters of a prompt


def checked(value: Any, *, giver: str) -> float:
    """``value`` as a number that can be trained on.

    Args:
        giver: who gave it, e.g. ``reward rule 'exact'``.
    Raises:
        RewardError: it is no number, or not a finite one in float32.
    """
    try:
        # Of text, float() would make a number.
        number = float(value) if hasattr(type(value), "__float__") else None
    except Exception as error:  # of a tensor with several numbers, of anything of the user's
        raise _refused(value, giver) from error
    if number is None or not math.isfinite(number) or abs(number) > _LARGEST:
        raise _refused(value, giver)
    return number


def score(rule: str, function: Callable[..., float], *, response: str, answer: str) -> float:
    """``function``'s score of ``response``; ``rule`` is its name.

    Raises:
        RewardError: it raised, or gave something that is no finite number.
    """
    giver = f"reward rule {rule!r}"
    try:
        value: Any = function(response=response, answer=answer)
    except Exception as error:  # a plug-in's
        raise raised(error, giver) from error
    return checked(value, giver=giver)


def raised(error: Exception, giver: str) -> RewardError:
    """What to say of an exception of a rule or an environment."""
    return RewardError(
        f"{giver} raised {type(error).__name__}: {error}"[:500],
        where=giver,
        fix="mend it, so that it gives a number for every answer; 0 is one",
    )


def of_record(error: RewardError, *, id: str, prompt: str) -> RewardError:
    """``error`` with the record that it is about."""
    shown = prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + " …"
    return RewardError(error.what, where=f"{error.where}, record {id}: {shown!r}", fix=error.fix)


def _refused(value: Any, giver: str) -> RewardError:
    return RewardError(
        f"{giver} gave {value!r:.100}, a {type(value).__name__}, which is no finite number",
        where=giver,
        fix="let it give a finite number for every answer; 0 is one",
    )


def too_many(num_set_aside: int, num_records: int) -> bool:
    """Whether so many records set aside, of all that were scored, are the rule's fault and not theirs."""
    return num_set_aside > _ALWAYS_ALLOWED + _SHARE_ALLOWED * num_records


class SetAside:
    """The records that a process has set aside; tells the log of each.

    Attributes:
        ids: theirs, in order.
        num_records: all that were scored or set aside.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.num_records = 0

    def twice(self, call: Callable[[], float], *, id: str, prompt: Callable[[], str]) -> float:
        """What ``call`` gives, tried once more if it raises RewardError; then NO_SCORE.

        Raises:
            RewardError: the second time, if too many records were set aside.
        """
        try:
            try:
                return call()
            except RewardError:
                return call()
        except RewardError as error:
            named = of_record(error, id=id, prompt=prompt())
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
                raise self.refusal(named) from error
            return NO_SCORE

    def refusal(self, last: RewardError) -> RewardError:
        """What ends the run."""
        return RewardError(
            f"{len(self.ids)} of {self.num_records} records got no reward; the last: {last.what}",
            where=last.where,
            fix=last.fix,
        )
