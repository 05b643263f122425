"""Calls reward rules: one expression of rules on many answers, blocking or asynchronous ones.

A rule that blocks is called in a guard (guard/guarded.py), in a fork of its own for each answer, several
at once; a batched rule gets all answers in one. Asynchronous ones (a judge behind a URL) run side by side
in one process of theirs, at most ``MOST_AT_ONCE``. Trusted rules run in this process, those that block one
at a time.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.grader import Grader, grader_of
from realsys.api.basics.reward import (
    BY_SOURCE,
    CORRECT,
    REWARD,
    TASK_SOURCE,
    Completion,
    Score,
    fields_of,
    fields_of_rules,
    reward_terms,
)
from realsys.api.basics.rule_permissions import (
    RulePermissions,
    registration_line,
    shown_permissions,
)
from realsys.api.errors import ClusterError, ConfigError, RewardError, SandboxFailure
from realsys.data.sources.reasoning_gym_questions import entry_of
from realsys.rewards.guard import inside
from realsys.rewards.guard.guarded import DIED, GRACE_S, MOST_FORKS, CallFailed, Guarded, Reply
from realsys.rewards.scores import checked_score, exception_error
from realsys.runtime.first_error import first_error
from realsys.runtime.progress import tick

RULE_IN_GUARD = "realsys.rewards.rule:rule_in_guard"
MATH_VERIFY, MATH_LIBRARY = "realsys.rewards.math_verify", "realsys.rewards.math_library"
MOST_AT_ONCE = 64  # answers of a process that asynchronous rules score at the same time
SHARE = "share"  # part of a mixture's scores
CALL_S = 600.0  # for one answer by an asynchronous rule
_SIDE_BY_SIDE = ("math_verify",)  # rules that call a guard themselves, and are thread-safe
_QUICK_S = 0.002  # within which such a rule needs no threads
_one_at_a_time = threading.Lock()
_guards: dict[str, Guarded] = {}  # of this process, by rule, arguments and permissions
_making_guards = threading.Lock()
_logged: set[str] = set()  # lines of permissions that were named in the log

logger = logging.getLogger(__name__)

Result = Score | RewardError


@dataclass(frozen=True)
class _Term:
    """One rule of an expression."""

    name: str
    weight: float
    function: Callable[..., Any]
    fields: frozenset[str]
    right: float
    batched: bool
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
            _term(name, weight, (args or {}).get(name, {}))
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

    @classmethod
    async def _of_term(cls, term: _Term, answer: Completion) -> Result:
        if not term.is_async:
            return (await asyncio.to_thread(cls._blocking, term, [answer]))[0]
        if term.guard is not None:
            return await _served(term, answer)
        source = f"reward rule {term.name!r}"
        try:
            async with asyncio.timeout(term.call_s) as limit:
                value = await _awaited(term, [answer])
            tick()
            return _as_score(value[0] if term.batched else value, term)
        except Exception as error:  # a plug-in may raise anything
            inside.note_raised(error)
            if not (isinstance(error, TimeoutError) and limit.expired()):
                return _error_of(error, source)
            return RewardError(
                f"{source} took more than {term.call_s:g} s",
                where=source,
                fix="make it quicker, or give it a deadline of its own",
            )

    @staticmethod
    def _blocking(term: _Term, answers: Sequence[Completion]) -> list[Result]:
        if term.guard is not None:
            return _guarded(term, answers)
        if term.name in _SIDE_BY_SIDE:
            return _in_threads(term, answers)
        with _one_at_a_time:
            if term.batched:
                return _batch(term, answers)
            return [_one(term, answer) for answer in answers]

    def _sum(self, given: Sequence[Result]) -> Result:
        """Sums what the terms gave to one answer."""
        scores: list[Score] = []
        for result in given:
            if isinstance(result, RewardError):
                return result
            scores.append(result)
        if len(scores) == 1 and self.terms[0].weight == 1.0:
            return scores[0]
        value, parts = 0.0, {}
        for term, score in zip(self.terms, scores, strict=True):
            value += term.weight * score.value
            parts[term.name] = score.value
            parts |= {f"{term.name}/{part}": number for part, number in score.parts.items()}
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


def _term(name: str, weight: float, args: Mapping[str, Any], *, in_guard: bool = False) -> _Term:
    function, options = registry.find_reward(name), registry.reward_options(name)
    fields = fields_of(function)
    if isinstance(function, type):
        function = registry.make_reward(name, **args)
    may = registry.reward_permissions(name, function)
    made = _Term(name, weight, function, fields, options.right, options.batched)
    if in_guard or may.runs_here:
        return made
    setup = json.dumps({"name": name, "args": args}, sort_keys=True, default=dict)
    return replace(made, guard=_guard_of(setup, may, options.source, made.is_async))


def _guard_of(setup: str, may: RulePermissions, source: str | None, serves: bool) -> Guarded:
    """Returns the guard of a rule. Raises ConfigError: no other process can make the rule."""
    key = json.dumps([setup, may.plain(), source])
    with _making_guards:
        if key not in _guards:
            _guards[key] = _new_guard(setup, may, source, serves)
        return _guards[key]


def close_guards() -> None:
    """Ends the guards of all rules of this process; a later call starts others."""
    with _making_guards:
        guards = list(_guards.values())
        _guards.clear()
    for guard in guards:
        guard.close()


def _new_guard(setup: str, may: RulePermissions, source: str | None, serves: bool) -> Guarded:
    name = json.loads(setup)["name"]
    is_built_in = name in plugin_table.BUILTIN["reward"]
    if source is None and not is_built_in:
        raise ConfigError(
            f"reward rule {name!r} was registered where no other process can find it, and rules run in "
            "processes of their own",
            where=f"register_reward({name!r}, …)",
            fix="put it into a file given by --import, or a module that registers it when it is imported; "
            "trusted=True runs it in the worker itself, without walls",
        )
    return Guarded(
        RULE_IN_GUARD,
        permissions=may,
        setup={**json.loads(setup), "source": source},
        imports=None if is_built_in else registry.imported_plugins(),
        own_file=_file_of(source),
        serves=serves,
    )


def _file_of(source: str | None) -> str | None:
    if source is None or source.endswith(".py"):
        return source
    return getattr(sys.modules.get(source), "__file__", None)


async def _awaited(term: _Term, answers: Sequence[Completion]) -> Any:
    result: Awaitable[Any] = term.function(**term.arguments(answers))
    return await result


# ---- in a guard ----------------------------------------------------------------------------------


def _guarded(term: _Term, answers: Sequence[Completion]) -> list[Result]:
    """Calls a blocking rule in its guard: once for each answer, a batched one once for all."""
    assert term.guard is not None
    calls = [list(answers)] if term.batched and answers else [[answer] for answer in answers]
    futures = [
        term.guard.submit({"answers": [sent_answer(a, term) for a in call]}, num_answers=len(call))
        for call in calls
    ]
    results: list[Result] = []
    for call, future in zip(calls, futures, strict=True):
        try:
            results += results_of(future.result(), term, len(call))
        except CallFailed as error:
            results += [_error_of(error, term.source)] * len(call)
        tick()
    return results


async def _served(term: _Term, answer: Completion) -> Result:
    """Calls an asynchronous rule in its process."""
    assert term.guard is not None
    sent, loop = {"answers": [sent_answer(answer, term)]}, asyncio.get_running_loop()
    limit_s = None if term.call_s is None else term.call_s + GRACE_S  # it keeps its limit itself
    try:
        future = await loop.run_in_executor(term.guard.sender, term.guard.submit, sent)
        async with asyncio.timeout(limit_s):
            reply = await asyncio.wrap_future(future)
        tick()
        _raise_cluster_error(reply)
        return results_of(reply, term, 1)[0]
    except TimeoutError:
        await asyncio.to_thread(term.guard.close)  # it blocks: a later call starts another
        return RewardError(
            f"{term.source} took more than {term.call_s:g} s",
            where=term.source,
            fix="make it quicker, let it await what it waits for, or give it a deadline of its own",
        )
    except CallFailed as error:
        return _error_of(error, term.source)


def _raise_cluster_error(reply: Reply) -> None:
    """Raises what ends the run, of a process that evaluates no answer's text."""
    given = reply.result[0] if isinstance(reply.result, list) and reply.result else {}
    if given.get("error") == ClusterError.__name__:
        raise ClusterError(given["what"], where=given["where"], fix=given["fix"])


def sent_answer(answer: Completion, term: _Term) -> dict[str, Any]:
    """Returns what a rule looks at of an answer, as JSON's values."""
    return {name: getattr(answer, name) for name in sorted(term.fields)}


def _received(sent: Mapping[str, Any]) -> Completion:
    given = dict(sent)
    prompt = given.pop("prompt", None)
    if prompt is not None:
        given["record"] = {"prompt": prompt, **given.get("record", {})}
    if "token_ids" in given:
        given["token_ids"] = tuple(given["token_ids"])
    return Completion(**{"response": "", **given})


def results_of(reply: Reply, term: _Term, num_answers: int) -> list[Result]:
    """Reads what came back from a guard. An answer's code may have written it: nothing in it is believed
    but numbers and texts."""
    _log_undeclared(reply, term)
    given = reply.result
    if not isinstance(given, list) or len(given) != num_answers:
        return [_error_of(CallFailed(DIED, "it gave no scores"), term.source)] * num_answers
    return [_result_of(one, term) for one in given]


def _result_of(given: Any, term: _Term) -> Result:
    try:
        if "value" in given:
            value = checked_score(given["value"], source=term.source)
            parts = {
                str(k): checked_score(v, source=term.source) for k, v in given["parts"].items()
            }
            return Score(value=value, correct=bool(given["correct"]), parts=parts)
        kinds: list[type[RewardError]] = [RewardError, *RewardError.__subclasses__()]
        kind = {one.__name__: one for one in kinds}.get(given["error"], RewardError)
        return kind(str(given["what"])[:500], where=str(given["where"]), fix=str(given["fix"]))
    except RewardError as error:
        return error
    except Exception:
        return _error_of(CallFailed(DIED, "it gave no scores"), term.source)


def _plain_result(result: Result | ClusterError) -> dict[str, Any]:
    if isinstance(result, Score):
        return {"value": result.value, "correct": result.correct, "parts": dict(result.parts)}
    kind, (what, where, fix) = type(result).__name__, (result.what, result.where, result.fix)
    return {"error": kind, "what": what, "where": where, "fix": fix}


def _log_undeclared(reply: Reply, term: _Term) -> None:
    """Warns once of each permission that a rule, or an answer's text, would have needed."""
    for line in undeclared_lines(reply, term.name, term.function):
        if line not in _logged:
            _logged.add(line)
            logger.warning(
                "%s, or an answer's text, used what it does not declare; if it is the rule: %s",
                term.source,
                line,
            )


def undeclared_lines(reply: Reply, name: str, function: Any) -> list[str]:
    """Returns the line that registers the rule with what it used, one for each thing that it did not
    declare."""
    may, lines = registry.reward_permissions(name, function), []
    rule = registry.find_reward(name)
    owner, _, shown = getattr(rule, "__qualname__", name).rpartition(".")
    is_of_task = bool(owner) and not owner.endswith("<locals>") and not isinstance(rule, type)
    for permission, value in reply.notes:
        if permission in ("network", "programs"):
            wanted = RulePermissions.of_plain({**may.plain(), permission: True})
        elif permission == "reads" and value not in may.reads and os.path.exists(value):
            wanted = replace(may, reads=(*may.reads, value))
        elif permission == "env" and value not in may.env and value in os.environ:
            wanted = replace(may, env=(*may.env, value))
        else:
            continue
        if is_of_task:  # which register_task registers
            lines.append(f"{shown_permissions(wanted)}, in class {owner}")
        else:
            lines.append(registration_line(name, shown, wanted))
    return lines


def rule_in_guard(setup: Mapping[str, Any]) -> Callable[..., Any]:
    """Makes the rule of a guard, in the guard's own process (guard/host_start.py).

    Args:
        setup: ``name``, ``args`` and ``source``, the module or file that registers it.
    Raises:
        ConfigError: importing that did not register it.
    """
    name, source = setup["name"], setup["source"]
    if source is not None:
        registry.load_plugins([source])
    if registry.check("reward", name, where="") is not None:
        raise ConfigError(
            f"importing {source} does not register reward rule {name!r}, and rules run in processes of "
            "their own",
            where=f"register_reward({name!r}, …)",
            fix="call register_reward when the file is imported, whoever imports it; trusted=True runs the "
            "rule in the worker itself, without walls",
        )
    term = _term(name, 1.0, setup["args"], in_guard=True)
    return _Served(term) if term.is_async else _Forked(term)


class _Noting:
    """A rule that notes where it raised, and what it lacked."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.rule = function

    def __call__(self, **arguments: Any) -> Any:
        try:
            return self.rule(**arguments)
        except Exception as error:
            inside.note_raised(error)
            raise


class _Forked:
    """A rule as the forks of its guard call it."""

    def __init__(self, term: _Term) -> None:
        self._term, self._rule = replace(term, function=_Noting(term.function)), term.function

    def prepare(self) -> None:
        """Loads what the rule's calls would load each for itself."""
        is_built_in = self._term.name in plugin_table.BUILTIN["reward"]
        if MATH_VERIFY in sys.modules and not is_built_in:
            importlib.import_module(MATH_LIBRARY).prepare()
        if self._term.name == "reasoning_gym":
            importlib.import_module("reasoning_gym")
        if (prepare := getattr(self._rule, "prepare", None)) is not None:
            prepare()

    def before_fork(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Makes a question of reasoning-gym again, once for all answers to it."""
        if self._term.name == "reasoning_gym":
            for answer in answers:
                entry_of(answer["record"])

    def __call__(self, answers: Sequence[Mapping[str, Any]]) -> list[Any]:
        given = [_received(answer) for answer in answers]
        if self._term.batched:
            return [_plain_result(result) for result in _batch(self._term, given)]
        return [_plain_result(_one(self._term, answer)) for answer in given]


class _Served:
    """A rule as the process of an asynchronous rule calls it."""

    def __init__(self, term: _Term) -> None:
        self._term, self.prepare = term, getattr(term.function, "prepare", None)

    async def __call__(self, answers: Sequence[Mapping[str, Any]]) -> list[Any]:
        (answer,) = answers
        try:
            return [_plain_result(await RewardRule._of_term(self._term, _received(answer)))]
        except ClusterError as error:  # which ends the run, in the process that asked
            return [_plain_result(error)]


# ---- in this process -----------------------------------------------------------------------------


def _in_threads(term: _Term, answers: Sequence[Completion]) -> list[Result]:
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


def _one(term: _Term, answer: Completion) -> Result:
    tick()
    try:
        return _as_score(term.function(**term.arguments([answer])), term)
    except Exception as error:  # a plug-in may raise anything
        return _error_of(error, f"reward rule {term.name!r}")


def _error_of(error: Exception, source: str) -> RewardError:
    """The error of one answer. What no other answer would fare better with is raised: it ends the run."""
    if isinstance(error, RewardError):
        return error
    if isinstance(error, ClusterError) and not isinstance(error, SandboxFailure):
        raise error
    made = exception_error(error, source)
    made.__cause__ = error
    return made


def _batch(term: _Term, answers: Sequence[Completion]) -> list[Result]:
    source = f"reward rule {term.name!r}"
    if not answers:
        return []
    try:
        values = list(term.function(**term.arguments(answers)))
    except Exception as error:  # a plug-in may raise anything
        return [_error_of(error, source)] * len(answers)
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


def _as_score(value: Any, term: _Term) -> Score:
    """Reads what a rule returned: a number, or parts with ``reward`` (else their sum) and ``correct``.

    Raises:
        RewardError: it is neither, or a number is not finite.
    """
    source = f"reward rule {term.name!r}"
    if not isinstance(value, Mapping):
        number = checked_score(value, source=source)
        return Score(value=number, correct=number >= term.right)
    parts = {str(k): checked_score(v, source=f"{source}, part {k!r}") for k, v in value.items()}
    counted = [number for name, number in parts.items() if name != CORRECT]
    if not counted:
        raise RewardError(
            f"{source} returned {value!r:.100}, which is not a finite number, nor has one to train on",
            where=source,
            fix="return a number under 'reward', or other named numbers, which are added",
        )
    total = parts.pop(REWARD, None)
    total = sum(counted) if total is None else total
    correct = bool(parts[CORRECT]) if CORRECT in parts else total >= term.right
    return Score(value=total, correct=correct, parts=parts)
