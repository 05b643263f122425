"""Scores a text by registered reward rules, for environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.api.agent import Answer
from realsys.api.basics.reward import Completion, Score, with_thoughts
from realsys.api.basics.thoughts import text_behind_thoughts
from realsys.api.errors import DataError, RewardServiceAway, RolloutError, WaitTimeout
from realsys.rewards.rule import rule_of

ASKED = (
    "realsys:question_text"  # beside a record's own fields, for rules alone; no column has the name
)


class AnswerScoring:
    """Scores the actions of one episode by the rules that the reward interface would use.

    Args:
        reward, reward_args: registered rules, and the arguments of those that take some; none where agents
            give their episodes' rewards themselves: ``score`` then says that one did not.
    """

    def __init__(self, reward: str, reward_args: Mapping[str, Any]) -> None:
        self._rule = rule_of(reward, reward_args) if reward else None
        self._record: Mapping[str, Any] = {}
        self._question = ""
        self._sampled: Answer | None = None

    def begin(self, record: Mapping[str, Any]) -> None:
        """Starts an episode on this record.

        Raises:
            DataError: a rule compares with the known answer, and the record has none.
        """
        if (
            self._rule is not None
            and "answer" in self._rule.fields
            and record.get("answer") is None
        ):
            raise DataError(
                "no known answer to compare with",
                where=f"a record with the fields {sorted(record)}",
                fix='use a data set whose records have "answer", e.g. math_prompts',
            )
        self._question = str(record.get(ASKED, ""))
        self._record = without_question_text(record)  # as the synchronous graph gives it to rules
        self._sampled = None

    def sampled(self, answer: Answer) -> None:
        """Remembers the tokens of the action that is scored next."""
        self._sampled = answer

    async def score(self, response: str) -> Score:
        """Scores ``response``.

        Raises:
            RolloutError: there is no rule. RewardError: a rule raised, or gave no finite number.
            WaitTimeout: the service that it asks is away, so that the episode is played again later, and
                its record is not set aside.
        """
        if self._rule is None:
            raise RolloutError(
                "an episode has no reward: its agent gave none, and no rule scores its answer",
                where="task.agent and task.reward",
                fix="return a number from the agent, or name a rule, e.g. task.reward=math_verify",
            )
        answer, tokens = self._record.get("answer"), self._sampled
        opened = tokens.opened if tokens is not None else ""
        completion = Completion(
            response=response or opened,  # of thoughts alone a chat has no text
            answer="" if answer is None else str(answer),
            record=self._record,
            token_ids=tokens.tokens if tokens is not None else (),
            finish_reason="stop" if tokens is None or tokens.stopped else "length",
            final=text_behind_thoughts(response, opened=opened) or "",
            question=self._question,
        )
        try:
            score = await self._rule.score(completion)
        except RewardServiceAway as error:
            raise WaitTimeout(error.what, where=error.where, fix=error.fix) from error
        return with_thoughts(score, completion)


def without_question_text(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the record as the data set has it, without what only rules are given."""
    if ASKED not in record:
        return record
    return {name: value for name, value in record.items() if name != ASKED}


def info_of(score: Score) -> dict[str, float]:
    """The parts of a score as numbers for the metrics, ``reward/<part>``."""
    return {f"reward/{name}": value for name, value in score.parts.items()}
