"""One reward rule of an expression: what it looks at, how this process calls it, and what it returned.

Most are called elsewhere: guarded_rules.py. Sums of several: rule.py.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from realsys.api import registry
from realsys.api.basics.reward import CORRECT, REWARD, Completion, Score, fields_of
from realsys.api.errors import ClusterError, RewardError, SandboxFailure
from realsys.rewards.guard import inside
from realsys.rewards.guard.guarded import MOST_FORKS, Guarded
from realsys.rewards.raised_scores import AnswerFailure, RaisedAnswers, raised_error
from realsys.rewards.scores import checked_score
from realsys.runtime.progress import tick

CALL_S = 600.0  # for one answer by an asynchronous rule
_SIDE_BY_SIDE = ("math_verify",)  # rules that call a guard themselves, and are thread-safe
_QUICK_S = 0.002  # within which such a rule needs no threads
_one_at_a_time = threading.Lock()

Result = Score | RewardError


@dataclass(frozen=True)
class RuleTerm:
    """One rule of an expression."""

    name: str
    weight: float
    function: Callable[..., Any]
    fields: frozenset[str]
    right: float
    batched: bool
    raised: RaisedAnswers
    guard: Guarded | None = None  # where it is called; None: here

    @property
    def is_async(self) -> bool:
        made = self.function
        return any(inspect.iscoroutinefunction(f) for f in (made, getattr(made, "__call__", None)))  # noqa: B004

    @property
    def call_s(self) -> float | None:
        """For one answer, if asynchronous; None: the rule's own limits do."""
        return getattr(self.function, "call_s", CALL_S)

    @property
    def source(self) -> str:
        """Names it in messages."""
        return f"reward rule {self.name!r}"

    def arguments(self, answers: Sequence[Completion]) -> dict[str, Any]:
        if self.batched:
            return {name: [getattr(a, name) for a in answers] for name in self.fields}
        return {name: getattr(answers[0], name) for name in self.fields}


def rule_term(name: str, weight: float, args: Mapping[str, Any]) -> RuleTerm:
    """Makes a rule with its arguments, to be called here. Raises ConfigError."""
    function, options = registry.find_reward(name), registry.reward_options(name)
    fields = fields_of(function)
    if isinstance(function, type):
        function = registry.make_reward(name, **args)
    raised = RaisedAnswers(f"reward rule {name!r}", batched=options.batched)
    return RuleTerm(name, weight, function, fields, options.right, options.batched, raised)


def called(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    """Calls a blocking rule in this process: one that need not be thread-safe, one answer at a time."""
    if term.name in _SIDE_BY_SIDE:
        return _in_threads(term, answers)
    with _one_at_a_time:
        return called_alone(term, answers)


def called_alone(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    """Calls a blocking rule in this process, in this thread."""
    return _batch(term, answers) if term.batched else [_one(term, answer) for answer in answers]


async def awaited(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    """Calls an asynchronous rule in this process, on one answer."""
    try:
        async with asyncio.timeout(term.call_s) as limit:
            made: Awaitable[Any] = term.function(**term.arguments(answers))
            value = await made
        tick()
        return [_as_score(value[0] if term.batched else value, term)]
    except Exception as error:  # a plug-in may raise anything
        inside.note_raised(error)
        if not (isinstance(error, TimeoutError) and limit.expired()):
            return [error_of(error, term.source, is_async=True)]
        return [overdue(term)]


def overdue(term: RuleTerm) -> RewardError:
    """Makes the error of a call that took too long."""
    return RewardError(
        f"{term.source} took more than {term.call_s:g} s",
        where=term.source,
        fix="make it quicker, let it await what it waits for, or give it a deadline of its own",
    )


def _in_threads(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    """Calls a rule that may wait for a guard of its own: in several threads, once it takes its time."""
    results: dict[int, Result] = {}
    rest = iter(range(len(answers)))
    taking = threading.Lock()

    def score(until_s: float = math.inf) -> None:
        while time.monotonic() < until_s:
            with taking:
                i = next(rest, None)
            if i is None:
                return
            results[i] = _one(term, answers[i])

    score(time.monotonic() + _QUICK_S)
    if len(results) < len(answers):
        with ThreadPoolExecutor(MOST_FORKS, thread_name_prefix="answers") as threads:
            number = min(MOST_FORKS, len(os.sched_getaffinity(0)) + 1, len(answers))
            for future in [threads.submit(score) for _ in range(number)]:
                future.result()
    return [results[i] for i in range(len(answers))]


def _one(term: RuleTerm, answer: Completion) -> Result:
    tick()
    try:
        return _as_score(term.function(**term.arguments([answer])), term)
    except Exception as error:  # a plug-in may raise anything
        return error_of(error, term.source)


def error_of(error: Exception, source: str, *, is_async: bool = False) -> RewardError:
    """The error of one answer. What no other answer would fare better with is raised: it ends the run."""
    if isinstance(error, RewardError):
        return error
    if isinstance(error, ClusterError) and not isinstance(error, SandboxFailure):
        raise error
    made = raised_error(error, source, is_async=is_async)
    made.__cause__ = error
    return made


def _batch(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    source = term.source
    if not answers:
        return []
    try:
        values = list(term.function(**term.arguments(answers)))
    except Exception as error:  # a plug-in may raise anything
        return [error_of(error, source)] * len(answers)
    if len(values) != len(answers):
        fix = "return one score for each response, in their order"
        what = f"{source} gave {len(values)} scores for {len(answers)} answers"
        return [RewardError(what, where=source, fix=fix)] * len(answers)
    results: list[Result] = []
    for value in values:
        try:
            results.append(_as_score(value, term))
        except RewardError as error:
            results.append(error)
    return results


def _as_score(value: Any, term: RuleTerm) -> Score:
    """Reads what a rule returned: a number, or parts with ``reward`` (else their sum) and ``correct``.

    Raises:
        RewardError: it is neither, or a number is not finite.
    """
    source = term.source
    if not isinstance(value, Mapping):
        number = checked_score(value, source=source)
        return Score(value=number, correct=number >= term.right)
    parts = {str(k): checked_score(v, source=f"{source}, part {k!r}") for k, v in value.items()}
    counted = [number for name, number in parts.items() if name != CORRECT]
    if not counted:
        raise AnswerFailure(
            f"{source} returned {value!r:.100}, which is not a finite number, nor has one to train on",
            where=source,
            fix="return a number under 'reward', or other named numbers, which are added",
        )
    total = parts.pop(REWARD, None)
    total = sum(counted) if total is None else total
    correct = bool(parts[CORRECT]) if CORRECT in parts else total >= term.right
    return Score(value=total, correct=correct, parts=parts)
