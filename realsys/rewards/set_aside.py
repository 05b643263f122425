"""Scores the answers to records, and sets aside the records that get no score.

An answer for which its rule returns no number is tried once more; then its record is *set aside*: it is not
trained on, and the run goes on. If there are too many of them, the rule is at fault, and the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import RewardError
from realsys.rewards.rule import RewardRule
from realsys.rewards.scores import too_many, with_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A record with the answers to it; ``prompt`` gives its text, for messages."""

    id: str
    prompt: Callable[[], str]
    answers: Sequence[Completion]


class SetAsideRecords:
    """Records that a process has set aside; logs each.

    Attributes:
        ids: ids of these records, in order.
        num_records: number of records scored or set aside.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._last = RewardError("no record was scored yet", where="", fix="")
        self.num_records = 0

    def scores(self, rule: RewardRule, records: Sequence[Answered]) -> list[list[Score] | None]:
        """Scores all answers; None for a record that is set aside.

        Raises:
            RewardError: too many records were set aside, or all of the first ones.
        """
        rest = iter(rule.score_twice([answer for record in records for answer in record.answers]))
        settled = [self._settle(record, [next(rest) for _ in record.answers]) for record in records]
        if len(records) > 1 and len(self.ids) == self.num_records:
            raise self._error(
                f"none of the first {self.num_records} records got a reward", self._last
            )
        return settled

    def _settle(self, record: Answered, given: Sequence[Score | RewardError]) -> list[Score] | None:
        self.num_records += 1
        errors = [result for result in given if isinstance(result, RewardError)]
        if not errors:
            return [result for result in given if isinstance(result, Score)]
        named = with_record(errors[0], id=record.id, prompt=record.prompt())
        if record.id not in self.ids:
            self.ids.append(record.id)
            logger.warning(
                "record set aside id=%s num=%d why=%s where=%s",
                record.id,
                len(self.ids),
                named.what,
                named.where,
            )
        if too_many(len(self.ids), self.num_records):
            what = f"{len(self.ids)} of {self.num_records} records got no reward"
            raise self._error(what, named) from errors[0]
        self._last = named
        return None

    def _error(self, what: str, last: RewardError) -> RewardError:
        return RewardError(f"{last.what}; {what}", where=last.where, fix=last.fix)
