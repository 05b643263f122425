"""Calls reward rules in guards: a fork for each answer, or one process for an asynchronous rule (guard/).

Both ends are here: what a worker sends and reads, and what runs in the guard's own process. What comes
back may have been written by an answer's code: nothing in it is believed but numbers and texts.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import Completion, Score
from realsys.api.basics.rule_permissions import (
    RulePermissions,
    registration_line,
    shown_permissions,
)
from realsys.api.errors import ClusterError, ConfigError, RewardError, RewardServiceAway
from realsys.data.sources.reasoning_gym_questions import entry_of
from realsys.rewards.guard import inside
from realsys.rewards.guard.guarded import DIED, GRACE_S, CallFailed, Guarded, Reply
from realsys.rewards.rule_terms import (
    Result,
    RuleTerm,
    awaited,
    called_alone,
    error_of,
    overdue,
    rule_term,
)
from realsys.rewards.scores import checked_score
from realsys.runtime.progress import tick

RULE_IN_GUARD = "realsys.rewards.guarded_rules:rule_in_guard"
MATH_VERIFY, MATH_LIBRARY = "realsys.rewards.math_verify", "realsys.rewards.math_library"
_guards: dict[str, Guarded] = {}  # of this process, by rule, arguments and permissions
_making_guards = threading.Lock()
_logged: set[str] = set()  # lines of permissions that were named in the log

logger = logging.getLogger(__name__)


def with_guard(term: RuleTerm, args: Mapping[str, Any]) -> RuleTerm:
    """Returns a rule with the guard in which it is called, unless it is trusted or contained.

    Raises:
        ConfigError: no other process can make the rule.
    """
    may = registry.reward_permissions(term.name, term.function)
    if may.runs_here:
        return term
    setup = json.dumps({"name": term.name, "args": args}, sort_keys=True, default=dict)
    source = registry.reward_options(term.name).source
    return replace(term, guard=_guard_of(setup, may, source, term.is_async))


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


# ---- in a guard ----------------------------------------------------------------------------------


def guarded(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    """Calls a blocking rule in its guard: once for each answer, a batched one once for all."""
    assert term.guard is not None
    calls = [list(answers)] if term.batched and answers else [[answer] for answer in answers]
    futures: list[Future[Reply] | CallFailed] = []
    for call in calls:
        sent = {"answers": [sent_answer(answer, term) for answer in call]}
        try:
            futures.append(term.guard.submit(sent, num_answers=len(call)))
        except CallFailed as error:
            futures.append(error)
    results: list[Result] = []
    for call, future in zip(calls, futures, strict=True):
        try:
            if isinstance(future, CallFailed):
                raise future
            results += results_of(future.result(), term, len(call))
        except CallFailed as error:
            results += [error_of(error, term.source)] * len(call)
        tick()
    return results


async def served(term: RuleTerm, answers: Sequence[Completion]) -> list[Result]:
    """Calls an asynchronous rule in its process, on one answer."""
    (answer,) = answers
    assert term.guard is not None
    sent, loop = {"answers": [sent_answer(answer, term)]}, asyncio.get_running_loop()
    limit_s = None if term.call_s is None else term.call_s + GRACE_S  # it keeps its limit itself
    try:
        future = await loop.run_in_executor(term.guard.sender, term.guard.submit, sent)
        async with asyncio.timeout(limit_s):
            reply = await asyncio.wrap_future(future)
        tick()
        _raise_cluster_error(reply)
        return results_of(reply, term, 1)
    except TimeoutError:
        await asyncio.to_thread(term.guard.close)  # it blocks: a later call starts another
        return [overdue(term)]
    except CallFailed as error:
        return [error_of(error, term.source, is_async=True)]


def _raise_cluster_error(reply: Reply) -> None:
    """Raises what ends the run, of a process that evaluates no answer's text."""
    given = reply.result[0] if isinstance(reply.result, list) and reply.result else {}
    if given.get("error") == ClusterError.__name__:
        raise ClusterError(given["what"], where=given["where"], fix=given["fix"])


def sent_answer(answer: Completion, term: RuleTerm) -> dict[str, Any]:
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


def results_of(reply: Reply, term: RuleTerm, num_answers: int) -> list[Result]:
    """Reads what came back from a guard. An answer's code may have written it: nothing in it is believed
    but numbers and texts."""
    _log_undeclared(reply, term)
    given = reply.result
    if not isinstance(given, list) or len(given) != num_answers:
        return [error_of(CallFailed(DIED, "it gave no scores"), term.source)] * num_answers
    return [_result_of(one, term) for one in given]


def _result_of(given: Any, term: RuleTerm) -> Result:
    try:
        if "value" in given:
            value = checked_score(given["value"], source=term.source)
            parts = {
                str(k): checked_score(v, source=term.source) for k, v in given["parts"].items()
            }
            return Score(value=value, correct=bool(given["correct"]), parts=parts)
        kinds: list[type[RewardError]] = [RewardError, *RewardError.__subclasses__()]
        kind = {one.__name__: one for one in kinds}.get(given["error"], RewardError)
        if kind is RewardServiceAway and not term.is_async:
            kind = RewardError  # an answer's code may say so, to be played again
        return kind(str(given["what"])[:500], where=str(given["where"]), fix=str(given["fix"]))
    except RewardError as error:
        return error
    except Exception:
        return error_of(CallFailed(DIED, "it gave no scores"), term.source)


def _plain_result(result: Result | ClusterError) -> dict[str, Any]:
    if isinstance(result, Score):
        return {"value": result.value, "correct": result.correct, "parts": dict(result.parts)}
    kind, (what, where, fix) = type(result).__name__, (result.what, result.where, result.fix)
    return {"error": kind, "what": what, "where": where, "fix": fix}


def _log_undeclared(reply: Reply, term: RuleTerm) -> None:
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
    term = rule_term(name, 1.0, setup["args"])
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

    def __init__(self, term: RuleTerm) -> None:
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
        return [_plain_result(result) for result in called_alone(self._term, given)]


class _Served:
    """A rule as the process of an asynchronous rule calls it."""

    def __init__(self, term: RuleTerm) -> None:
        self._term, self.prepare = term, getattr(term.function, "prepare", None)

    async def __call__(self, answers: Sequence[Mapping[str, Any]]) -> list[Any]:
        try:
            return [
                _plain_result(x) for x in await awaited(self._term, list(map(_received, answers)))
            ]
        except ClusterError as error:  # which ends the run, in the process that asked
            return [_plain_result(error)]
