"""Tries a task's reward rules in a plan, and names those that run in the workers themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import Completion, reward_terms
from realsys.api.errors import ConfigError

# By name: an experiment knows nothing of how rules are called.
TRUSTED = "rule {} is trusted: it runs in the workers' own process, without walls or limits"
TRIAL = "realsys.rewards.trial_scoring:problems_of_rule"


def right_answer(record: Mapping[str, Any], *, whole: bool = False) -> Completion:
    """Returns the right answer to a record as its rule gets it.

    Args:
        whole: rules get the whole known answer; else what follows the last ``####``.
    """
    known = str(record.get("answer") or "")
    answer = known if whole else known.rpartition("####")[2].strip()
    return Completion(response=known, answer=answer, record={**record, "answer": answer})


def trial_problems(
    name: str,
    args: Mapping[str, Any],
    answer: Completion,
    *,
    where: str,
    may_raise: bool = False,
) -> Iterator[ConfigError]:
    """Scores a right answer by a user's rule as a worker would; yields what is wrong with the rule.

    Args:
        may_raise: it may want another form than the data has; only what it does not declare is a problem.
    """
    if (
        name in plugin_table.BUILTIN["reward"]
        or registry.check("reward", name, where="") is not None
    ):
        return
    try:
        yield from plugin_table.load(TRIAL)(name, args, answer, where=where, may_raise=may_raise)
    except ConfigError as error:
        yield error


def declared_problems(
    expression: str, args: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any]
) -> Iterator[ConfigError]:
    """Yields what the rules of an expression use without declaring it, on the right answer to a record."""
    with suppress(ConfigError):
        for name, _ in reward_terms(expression):
            if name in plugin_table.BUILTIN["reward"]:
                continue
            yield from trial_problems(
                name,
                args.get(name, {}),
                right_answer(record, whole=True),
                where="task.reward",
                may_raise=True,
            )


def trusted_rules(expression: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of rules that run in the workers themselves."""
    with suppress(ConfigError, TypeError):
        names = [name for name, _ in reward_terms(expression)]
        return tuple(name for name in names if _is_trusted(name, args.get(name, {})))
    return ()


def _is_trusted(name: str, args: Mapping[str, Any]) -> bool:
    if (
        name in plugin_table.BUILTIN["reward"]
        or registry.check("reward", name, where="") is not None
    ):
        return False
    rule = registry.find_reward(name)
    if isinstance(getattr(rule, "permissions", None), property):
        rule = registry.make_reward(name, **args)
    return registry.reward_permissions(name, rule).trusted
