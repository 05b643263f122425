"""Rewards of a mixture: each answer is scored by the rules of the source that its question is from.

Parts of a score are named by the source: ``<source>`` is the score itself, ``<source>/correct``,
``<source>/share`` (1 for an answer of this source, else 0) and ``<source>/<part>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realsys.api.basics.reward import CORRECT, TASK_SOURCE, Completion, Score
from realsys.api.errors import RewardError
from realsys.rewards.rule import Result, RewardRule, rule_of

SHARE = "share"


class RewardsOfSources(RewardRule):
    """The rules of all sources.

    Args:
        sources: source's name → ``{"reward": …, "reward_args": …}``.
    Raises:
        ConfigError: as for ``RewardRule``.
    """

    def __init__(self, sources: Mapping[str, Mapping[str, Any]]) -> None:
        self._rules = {
            name: rule_of(given["reward"], given.get("reward_args"))
            for name, given in sources.items()
        }
        self.terms = ()
        self.sources = tuple(sources)
        self.fields = frozenset({"record"}).union(*(rule.fields for rule in self._rules.values()))

    def score_all(self, answers: Sequence[Completion]) -> list[Result]:
        """Scores answers, in order; blocks. The answers of a source are scored together."""
        found: dict[int, Result] = {}
        for name, rule in self._rules.items():
            own = [i for i, answer in enumerate(answers) if self._source_of(answer) == name]
            given = rule.score_all([answers[i] for i in own]) if own else []
            for i, result in zip(own, given, strict=True):
                found[i] = self._named(result, name) if isinstance(result, Score) else result
        return [found[i] for i in range(len(answers))]

    async def score(self, answer: Completion) -> Score:
        """Scores one answer without blocking the event loop. Raises RewardError."""
        name = self._source_of(answer)
        return self._named(await self._rules[name].score(answer), name)

    def _source_of(self, answer: Completion) -> str:
        name = str(answer.record.get(TASK_SOURCE))
        if name in self._rules:
            return name
        raise RewardError(
            f"an answer's record is of source {name!r}, which has no rule",
            where="rewards of task mixture",
            fix=f"use data whose records have {TASK_SOURCE}, one of {', '.join(self._rules)}",
        )

    def _named(self, score: Score, name: str) -> Score:
        """The score with its parts named by its source."""
        own = {f"{name}/{part}": number for part, number in score.parts.items()}
        shares = {f"{other}/{SHARE}": float(other == name) for other in self._rules}
        parts = {name: score.value, f"{name}/{CORRECT}": float(score.correct), **own, **shares}
        return replace(score, parts=parts)
