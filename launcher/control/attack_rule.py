"""Prepares a reward rule to be attacked, for ``realsys data score RULE --attack``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.control.rescore_trial import rule_settings
from launcher.submit.planning import import_all

if TYPE_CHECKING:
    from realsys.rewards.attack.play_attack import RuleAttack

_CODE = "realsys.rewards.attack.play_attack"


def attack_rule(
    rule: str,
    words: Sequence[str],
    *,
    imports: Sequence[str],
    tasks: Sequence[str],
    records: Path | None,
    deadline_s: float,
    say: Callable[[str], None],
) -> RuleAttack:
    """Plays the corpus on an expression of rules, in a process of its own.

    Args:
        words: settings ``task.reward_args.NAME.FIELD=VALUE``.
        tasks, records, deadline_s, say: as of ``play_attack``.
    Raises:
        ConfigError: the rule, its arguments, a task or the records. RewardError: the rule can't be made.
    """
    found = import_all(imports)
    settings = rule_settings({}, rule, words)
    play: Callable[..., RuleAttack] = importlib.import_module(_CODE).play_attack
    return play(
        rule,
        settings.reward_args,
        imports=found,
        tasks=tasks,
        records=records,
        deadline_s=deadline_s,
        say=say,
    )
