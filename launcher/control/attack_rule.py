"""Plays the corpus of exploits and honest paraphrases on a reward rule, for ``realsys data score --attack``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.control.rescore_trial import rule_settings
from launcher.submit.planning import import_all
from realsys.api.errors import ConfigError, raise_all
from realsys.config.extras import missing_packages
from realsys.rewards.attack.attack_answers import (
    Attack,
    AttackQuestion,
    attack_of_texts,
    wrong_values,
)
from realsys.rewards.attack.attack_corpus import exploits, paraphrases
from realsys.rewards.attack.attack_report import AttackReport, report_of
from realsys.rewards.attack.attack_scoring import AttackProcess
from realsys.rewards.attack.by_design import ALL_TASKS, DEFAULT_TASKS, TASKS, designed

GYM = "reasoning_gym"
GENERATORS = ("chain_sum", "spell_backward", "prime_factorization")  # played if none is named
PROGRESS_S = 5.0
MOST_RECORDS = 20


@dataclass(frozen=True, kw_only=True)
class RuleAttack:
    """What was played on what, and what was found. ``parts``: name of a task or a scorer → its report."""

    rule: str
    parts: dict[str, AttackReport]

    @property
    def is_exploited(self) -> bool:
        """Whether an exploit is paid above an honest wrong answer, run, or never ends."""
        return any(report.is_exploited for report in self.parts.values())


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
    """Plays the corpus on an expression of rules.

    Args:
        words: settings ``task.reward_args.NAME.FIELD=VALUE``.
        tasks: of the corpus, or generators of reasoning-gym; none: those that fit the rule.
        records: a user's own questions, JSON lines with ``prompt`` and ``answer``.
        deadline_s: of one answer.
        say: gets a line now and then.
    Raises:
        ConfigError: the rule, its arguments, a task or the records. RewardError: the rule can't be made.
    """
    found = import_all(imports)
    settings = rule_settings({}, rule, words)
    keys = [str(args["api_key_env"]) for args in settings.reward_args.values() if args.get("api_key_env")]
    parts: dict[str, AttackReport] = {}
    with AttackProcess(
        rule, settings.reward_args, imports=found, deadline_s=deadline_s, env=keys
    ) as process:
        for name, attack, reasons in _attacks(rule, tasks, records, str(process.mark)):
            report = _Progress(name, len(attack.answers), say)
            parts[name] = report_of(attack, process.scores(attack, report=report), by_design=reasons)
    return RuleAttack(rule=rule, parts=parts)


class _Progress:
    def __init__(self, name: str, num: int, say: Callable[[str], None]) -> None:
        self._name, self._num, self._say, self._said_s = name, num, say, time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._said_s > PROGRESS_S:
            self._said_s = time.monotonic()
            self._say(f"{self._name}: {done:,} of {self._num:,} answers")


def _attacks(
    rule: str, tasks: Sequence[str], records: Path | None, mark: str
) -> list[tuple[str, Attack, dict[str, str]]]:
    if rule == GYM:
        raise_all(missing_packages(["reasoning_gym"], where="realsys data score reasoning_gym"))
        from realsys.data.sources.reasoning_gym_questions import generators
        from realsys.data.sources.reasoning_gym_scorers import PAYING
        from realsys.rewards.attack.gym_attack import gym_attack

        names = tasks or GENERATORS
        _check_names(names, generators(), "reasoning-gym has no generator")
        kinds = {exploit.kind for exploit in exploits()}
        return [
            (
                name,
                gym_attack(name, mark=mark),
                dict.fromkeys(kinds, PAYING[name]) if name in PAYING else {},
            )
            for name in names
        ]
    chosen = tuple(tasks) or TASKS.get(rule, DEFAULT_TASKS)
    _check_names(chosen, ALL_TASKS, "the corpus has no task")
    questions = _own_questions(records) if records is not None else ()
    attack = attack_of_texts(
        exploits(), paraphrases(), tasks=chosen, mark=mark, questions=questions
    )
    return [(", ".join(chosen), attack, designed(rule))]


def _check_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    from realsys.api.errors import did_you_mean

    for name in names:
        if name not in known:
            raise ConfigError(f"{what} {name!r}", where="--tasks", fix=did_you_mean(name, known))


def _own_questions(file: Path) -> list[AttackQuestion]:
    """Reads the first records of a file; each gets the answers of others as wrong ones."""
    import json

    try:
        with file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for _, line in zip(range(MOST_RECORDS), lines, strict=False)]
        known = [str(row["answer"]).rpartition("####")[2].strip() for row in rows]
        prompts = [str(row["prompt"]) for row in rows]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{file} can't be read as questions: {type(error).__name__}: {error}",
            where="--records",
            fix='give JSON lines of {"prompt": …, "answer": …}',
        ) from error
    return [
        AttackQuestion(
            name=f"record {number}",
            prompt=prompt,
            answer=answer,
            wrong=(*dict.fromkeys(k for k in known if k != answer), *wrong_values(answer))[:4],
            record=row,
        )
        for number, (row, prompt, answer) in enumerate(zip(rows, prompts, known, strict=True))
    ]
