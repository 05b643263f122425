"""Tries a rule on one right answer, as a worker would call it: for a plan, before anything starts.

What the rule uses without having declared it fails here, with the line to add. Experiments find this by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.api import registry
from realsys.api.basics.reward import Completion
from realsys.api.errors import ConfigError, RewardError
from realsys.rewards.guard.guarded import CallFailed, Reply
from realsys.rewards.guarded_rules import close_guards, results_of, sent_answer, undeclared_lines
from realsys.rewards.rule import RewardRule


def problems_of_rule(
    name: str, args: Mapping[str, Any], answer: Completion, *, where: str, may_raise: bool
) -> list[ConfigError]:
    """Scores ``answer`` by a rule; returns what it used without declaring it, else why it has no score.

    Args:
        may_raise: that it has no score is no problem: it may want another form than the data has.

    Not called: rules that may use the network, as a service may cost money, and asynchronous ones that are
    trusted.

    Raises:
        ConfigError: no other process can make the rule.
    """
    rule = RewardRule(name, {name: args})
    (term,) = rule.terms
    may = registry.reward_permissions(name, term.function)
    if may.contained or may.network or (may.trusted and term.is_async):
        return []
    if term.guard is None and may_raise:
        return []
    if term.guard is None:
        results, reply = rule.score_all([answer]), Reply(None)
    else:
        try:
            reply = term.guard.submit({"answers": [sent_answer(answer, term)]}).result()
            results = results_of(reply, term, 1)
        except CallFailed as error:
            if may_raise:
                return []
            fix = (
                "make it quicker, or declare deadline_s=, cpu_s= or memory_mib= in register_reward"
            )
            return [ConfigError(f"reward rule {name!r}: {error.text}", where=where, fix=fix)]
        finally:
            close_guards()
    if lines := undeclared_lines(reply, name, term.function):
        return [
            ConfigError(
                f"reward rule {name!r} uses what it does not declare",
                where=where,
                fix=f"add it: {line}",
            )
            for line in lines
        ]
    places = [value for key, value in reply.notes if key == "raised_at"]
    return [
        ConfigError(
            error.what,
            where=", ".join([where, *places]),
            fix="repair it; a plan scores one right answer",
        )
        for error in results
        if isinstance(error, RewardError) and not may_raise
    ]
