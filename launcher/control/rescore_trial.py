"""Prepares a trial's stored rollouts to be scored by another reward rule, for ``realsys rescore``."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from launcher.submit.other_code import check_settings_readable, refused_with_revision
from launcher.submit.planning import import_all
from realsys.api.basics.reward import reward_terms, rule_problems
from realsys.api.errors import ConfigError, TrialError, raise_all
from realsys.api.plan import LaunchPlan, read_plan
from realsys.api.worker_configs import RolloutWorker
from realsys.config.extras import missing_packages
from realsys.config.overrides import with_settings
from realsys.config.plugin_arguments import argument_problems
from realsys.trial.records import PhaseFiles, TrialFiles

if TYPE_CHECKING:
    from realsys.evaluator.rescore import RescoredDatapoint, StoredRollouts

_CODE = "realsys.evaluator.rescore"  # with torch, so imported when it is used
_NEEDED = ("torch", "transformers")
_PART = "part "  # in front of names of parts, in sums
ALL = "all"
_ENVIRONMENT = "math_verify"  # whose rewards are the rule's


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """The settings of a rule, by the names that a launch has for them."""

    reward: str = ""
    reward_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    task: RuleSettings


def stored_rollouts(
    files: TrialFiles, *, reward: str | None, words: Sequence[str], imports: Sequence[str]
) -> StoredRollouts:
    """Opens a trial's stored rollouts, to be scored by a rule.

    Args:
        reward: an expression of rules; None: the trial's own.
        words: settings ``task.reward_args.NAME.FIELD=VALUE``; arguments that the trial has for a rule hold
            where they aren't given.
    Raises:
        TrialError: the trial stored no rollouts, or its rewards weren't a rule's alone. ConfigError: the
            rule, its arguments, or missing packages. DataError: the data set can't be read any more.
    """
    with refused_with_revision(files, "rescore"):
        plan = read_plan(files.plan)
        import_all([*plan.imports, *imports])
        check_settings_readable(files, replace(plan, snapshot=False))
    worker = _rollout_worker(plan, files)
    rule = rule_settings(worker.env_args, reward, words)
    raise_all(missing_packages(_NEEDED, where="realsys rescore"))
    make: type[StoredRollouts] = importlib.import_module(_CODE).StoredRollouts
    return make(worker, PhaseFiles(files.root).rollout_dump, rule.reward, rule.reward_args)


def _rollout_worker(plan: LaunchPlan, files: TrialFiles) -> RolloutWorker:
    """Returns how the trial's rollout workers were made. Raises TrialError: nothing can be rescored."""
    workers = plan.phase("main").config.rollout_worker
    why = ""
    if not workers:
        why = "its trainers sampled the answers, and keep none"
    elif not any(PhaseFiles(files.root).rollout_dump.glob("*.rollouts")):
        off = "" if workers[0].dump else ": it ran with schedule.dump=false"
        why = f"it has no stored rollouts{off}"
    elif workers[0].env != _ENVIRONMENT:
        why = f"its rewards are those of the environment {workers[0].env!r}, not of a rule alone"
    if not why:
        return workers[0]
    raise TrialError(
        f"{plan.trial} can't be rescored: {why}",
        where=str(files.root),
        fix="rescore a trial with schedule=async, detached or rollout, schedule.dump=true and "
        f"task.env={_ENVIRONMENT}",
    )


def rule_settings(
    env_args: Mapping[str, Any], reward: str | None, words: Sequence[str]
) -> RuleSettings:
    """Returns the new rule with its arguments, checked as a launch checks them.

    Raises:
        ConfigError: the expression, an unknown rule, or its arguments.
    """
    expression = reward if reward is not None else str(env_args.get("reward", ""))
    names = {name for name, _ in reward_terms(expression)}
    if other := [word for word in words if not word.startswith("task.reward_args.")]:
        raise ConfigError(
            f"{other[0]!r} is no argument of a rule",
            where="command line",
            fix="give --reward RULE, and task.reward_args.NAME.FIELD=VALUE",
        )
    old = {k: v for k, v in env_args.get("reward_args", {}).items() if k in names}
    made: _Settings = with_settings(
        _Settings(task=RuleSettings(reward=expression, reward_args=old)), words=words
    )
    rule = made.task
    raise_all(rule_problems(rule.reward, rule.reward_args, where="task.reward"))
    for name in sorted(names):
        args = rule.reward_args.get(name, {})
        raise_all(argument_problems("reward", name, args, where="task.reward_args"))
    return rule


class RescoredSums:
    """Sums over rescored datapoints, by version of the weights and of all.

    Attributes:
        problem: why the first datapoint without a score has none; empty: all have one.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {}
        self.problem = ""

    def add(self, found: RescoredDatapoint) -> None:
        """Adds a datapoint."""
        self.problem = self.problem or found.problem
        row = [("datapoints", 1.0), ("unscored", float(not found.new))]
        if found.new:
            columns = {"old": found.old, "new": found.new, "correct": found.correct}
            row += [("answers", len(found.new)), *((k, sum(v)) for k, v in columns.items())]
            row += [(f"{_PART}{k}", v) for parts in found.parts for k, v in parts.items()]
        for key in (str(found.version), ALL):
            sums = self._sums.setdefault(key, defaultdict(float))
            for name, value in row:
                sums[name] += value

    @property
    def is_unscored(self) -> bool:
        """True if there are datapoints, and none of them has a score."""
        found = self._sums.get(ALL)
        return found is not None and found["unscored"] == found["datapoints"]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Returns a row for each version of the weights, then one for all.

        It has ``datapoints``, those of them that are ``unscored``, of the others the number of ``answers``,
        means of ``old`` and ``new`` rewards, the share that is ``correct`` by the new rule, and means of
        its ``parts``. None: no answer has a score.
        """
        versions = sorted(self._sums.keys() - {ALL}, key=int)
        return {key: _row(self._sums[key]) for key in (*versions, *([ALL] if versions else []))}


def _row(sums: Mapping[str, float]) -> dict[str, Any]:
    count = int(sums.get("answers", 0))
    means = {name: sums[name] / count if count else None for name in ("old", "new", "correct")}
    parts = {k.removeprefix(_PART): v / count for k, v in sums.items() if k.startswith(_PART)}
    counts = {name: int(sums[name]) for name in ("datapoints", "unscored")}
    return {**counts, "answers": count, **means, "parts": parts}
