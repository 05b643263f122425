"""Calls reward rules: one expression of rules on many answers, blocking or asynchronous ones.

A rule that blocks is called in a guard, in a fork of its own for each answer, several at once; a batched
rule gets all answers in one. Asynchronous ones (a judge behind a URL) run side by side in one process of
theirs, at most ``MOST_AT_ONCE`` (guarded_rules.py). Trusted rules run in this process, those that block one
at a time (rule_terms.py). What becomes of an answer on which a rule fails: raised_scores.py.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from realsys.api.basics.grader import Grader, grader_of
from realsys.api.basics.reward import (
    BY_SOURCE,
    CORRECT,
    RAISED,
    TASK_SOURCE,
    Completion,
    Score,
    fields_of_rules,
    reward_terms,
)
from realsys.api.errors import RewardError
from realsys.rewards.guarded_rules import guarded, served, with_guard
from realsys.rewards.raised_scores import raised_score
from realsys.rewards.rule_terms import Result, RuleTerm, awaited, called, rule_term
from realsys.runtime.first_error import first_error

MOST_AT_ONCE = 64  # answers of a process that asynchronous rules score at the same time
SHARE = "share"  # part of a mixture's scores


class RewardRule:
    """The rules of an expression, made with their arguments.

    Args:
        expression: ``name`` or ``name + 0.2*other`` (realsys.api.basics.reward).
        args: rule's name → its arguments, for rules that are dataclasses.
    Raises:
        ConfigError: the expression is wrong, a rule is unknown or doesn't take its arguments.
    """

    sources: tuple[str, ...] = ()  # of a mixture, whose answers are counted by source

    def __init__(
        self, expression: str, args: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.terms = tuple(
            _made_term(name, weight, (args or {}).get(name, {}))
            for name, weight in reward_terms(expression)
        )
        self.fields = frozenset().union(*(term.fields for term in self.terms))

    def score_all(self, answers: Sequence[Completion]) -> list[Result]:
        """Scores answers, in order; blocks. An answer that a rule can't score gets its RewardError."""
        if self.is_async:
            return asyncio.run(self._side_by_side(answers))
        found = [self._blocking(term, answers) for term in self.terms]
        return [self._sum(given) for given in zip(*found, strict=True)]

    def score_twice(self, answers: Sequence[Completion]) -> list[Result]:
        """Scores answers, in order; those that get no score once more."""
        found = self.score_all(answers)
        failed = [i for i, result in enumerate(found) if isinstance(result, RewardError)]
        for i, again in zip(failed, self.score_all([answers[i] for i in failed]), strict=True):
            found[i] = again
        return found

    async def score_side_by_side(self, answers: Sequence[Completion]) -> list[Result]:
        """As ``score_all``, without blocking the event loop."""
        if self.is_async:
            return await self._side_by_side(answers)
        return await asyncio.to_thread(self.score_all, answers)

    @property
    def is_async(self) -> bool:
        """Whether some rule is asynchronous."""
        return any(term.is_async for term in self.terms)

    async def score(self, answer: Completion) -> Score:
        """Scores one answer without blocking the event loop. Raises RewardError."""
        given = [await self._of_term(term, answer) for term in self.terms]
        result = self._sum(given)
        if isinstance(result, RewardError):
            raise result
        return result

    async def _side_by_side(self, answers: Sequence[Completion]) -> list[Result]:
        limit = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(answer: Completion) -> Result:
            async with limit:
                try:
                    return await self.score(answer)
                except RewardError as error:
                    return error

        async with first_error(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(answer)) for answer in answers]
        return [task.result() for task in tasks]

    async def _of_term(self, term: RuleTerm, answer: Completion) -> Result:
        if not term.is_async:
            return (await asyncio.to_thread(self._blocking, term, [answer]))[0]
        call = awaited if term.guard is None else served
        (result,) = await term.raised.settled_later([answer], partial(call, term))
        return result

    @staticmethod
    def _blocking(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
        call = called if term.guard is None else guarded
        return term.raised.settled(answers, partial(call, term))

    def _sum(self, given: Sequence[Result]) -> Result:
        """Sums what the terms gave to one answer."""
        scores: list[Score] = []
        for result in given:
            if isinstance(result, RewardError):
                return result
            scores.append(result)
        if len(scores) == 1 and self.terms[0].weight == 1.0:
            return scores[0]
        value, parts, is_raised = 0.0, {}, False
        for term, score in zip(self.terms, scores, strict=True):
            if RAISED in score.parts:
                is_raised = True
                continue
            value += term.weight * score.value
            parts[term.name] = score.value
            parts |= {f"{term.name}/{part}": number for part, number in score.parts.items()}
        if is_raised:
            return raised_score(value, parts)
        return Score(value=value, correct=scores[0].correct, parts=parts)


class RewardsOfSources(RewardRule):
    """Rules of a mixture: each answer is scored by those of the source that its question is from.

    Parts of a score are named by the source: ``<source>`` is the score itself, ``<source>/correct``,
    ``<source>/share`` (1 for an answer of this source, else 0) and ``<source>/<part>``.

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

    @property
    def is_async(self) -> bool:
        """Whether some source has an asynchronous rule."""
        return any(rule.is_async for rule in self._rules.values())

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


class RuleElsewhere(RewardRule):
    """Rules that the run's reward workers call, which are made there alone."""

    def __init__(self, expression: str, args: Mapping[str, Any], grader: Grader) -> None:
        self._grader, self.terms = grader, ()
        self.sources = tuple(args) if expression == BY_SOURCE else ()
        self.fields = fields_of_rules(expression, args)

    def score_all(self, answers: Sequence[Completion]) -> list[Result]:
        """Scores answers, in order, each on a second worker if the first gives no score; blocks."""
        return self._grader.score_all(answers)

    def score_twice(self, answers: Sequence[Completion]) -> list[Result]:
        """As ``score_all``."""
        return self.score_all(answers)

    async def score(self, answer: Completion) -> Score:
        """Scores one answer without blocking the event loop. Raises RewardError."""
        return await self._grader.score(answer)


def rule_of(expression: str, args: Mapping[str, Any] | None = None) -> RewardRule:
    """Returns the rule of an expression, made once a process, or called elsewhere. Raises ConfigError."""
    if (grader := grader_of(expression, args)) is not None:
        return RuleElsewhere(expression, args or {}, grader)
    return made_rule(expression, json.dumps(args or {}, sort_keys=True, default=dict))


@functools.lru_cache(maxsize=64)
def made_rule(expression: str, args: str) -> RewardRule:
    """Makes a rule from its arguments' JSON."""
    if expression == BY_SOURCE:
        return RewardsOfSources(json.loads(args))
    return RewardRule(expression, json.loads(args))


def _made_term(name: str, weight: float, args: Mapping[str, Any]) -> RuleTerm:
    return with_guard(rule_term(name, weight, args), args)
