"""Plays the corpus on a reward rule: which questions, in which process, with which excuses. No torch.

The launcher finds this by name (launcher/control/attack_rule.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.basics.reward import reward_terms
from realsys.api.errors import ConfigError, did_you_mean, raise_all
from realsys.api.registry import reward_options
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

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {name: report.to_json() for name, report in self.parts.items()}

    @property
    def is_exploited(self) -> bool:
        """Whether an exploit is paid above an honest wrong answer, run, or never ends."""
        return any(report.is_exploited for report in self.parts.values())


def play_attack(
    rule: str,
    args: Mapping[str, Mapping[str, Any]],
    *,
    imports: Sequence[str],
    tasks: Sequence[str],
    records: Path | None,
    deadline_s: float,
    say: Callable[[str], None],
) -> RuleAttack:
    """Plays the corpus on an expression of rules.

    Args:
        args: rule's name → its arguments. imports: files and modules that register the rules.
        tasks: of the corpus, or generators of reasoning-gym; none: those that fit the rule.
        records: a user's own questions, JSON lines with ``prompt`` and ``answer``.
        deadline_s: of one answer.
        say: gets a line now and then.
    Raises:
        ConfigError: an unknown task or generator, or the records. RewardError: the rule can't be made.
    """
    keys = [str(given["api_key_env"]) for given in args.values() if given.get("api_key_env")]
    keys += [n for name, _ in reward_terms(rule) for n in reward_options(name).permissions.env]
    parts: dict[str, AttackReport] = {}
    with AttackProcess(rule, args, imports=imports, deadline_s=deadline_s, env=keys) as process:
        for name, attack, reasons, excuse in _attacks(rule, tasks, records, str(process.mark)):
            scores = process.scores(attack, report=_Progress(name, len(attack.answers), say))
            parts[name] = report_of(attack, scores, by_design=reasons, excuse=excuse)
    return RuleAttack(rule=rule, parts=parts)


class _Progress:
    def __init__(self, name: str, num: int, say: Callable[[str], None]) -> None:
        self._name, self._num, self._say, self._logged_s = name, num, say, time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._logged_s > PROGRESS_S:
            self._logged_s = time.monotonic()
            self._say(f"{self._name}: {done:,} of {self._num:,} answers")


def _attacks(
    rule: str, tasks: Sequence[str], records: Path | None, mark: str
) -> Iterator[tuple[str, Attack, dict[str, str], str]]:
    """Yields name, attack, what is paid by design, and the excuse of a scorer that is listed."""
    if rule == GYM:
        raise_all(missing_packages(["reasoning_gym"], where="realsys data score reasoning_gym"))
        from realsys.data.sources.reasoning_gym_questions import PAYING, generators
        from realsys.rewards.attack.gym_attack import gym_attack

        names = tasks or GENERATORS
        _check_names(names, generators(), "reasoning-gym has no generator")
        for name in names:
            yield name, gym_attack(name, mark=mark), {}, PAYING.get(name, "")
        return
    chosen = tuple(tasks) or TASKS.get(rule, DEFAULT_TASKS)
    _check_names(chosen, ALL_TASKS, "the corpus has no task")
    questions = _own_questions(records) if records is not None else ()
    attack = attack_of_texts(
        exploits(), paraphrases(), tasks=chosen, mark=mark, questions=questions
    )
    yield ", ".join(chosen), attack, designed(rule), ""


def _check_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{what} {name!r}", where="--tasks", fix=did_you_mean(name, known))


def _own_questions(file: Path) -> list[AttackQuestion]:
    """Reads the first records of a file; each gets the answers of others as wrong ones."""
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
