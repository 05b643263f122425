"""The attack on a scorer of reasoning-gym: exploits and many forms of right answers, on its own records."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.data.sources.reasoning_gym_questions import question_of
from realsys.rewards.attack.attack_answers import Attack, AttackQuestion, attack_of_records
from realsys.rewards.attack.attack_corpus import exploits

TASKS = ("math", "any", "reasoning_gym")  # of exploits that are played on them
NUM_HONEST = 4  # records whose right answers are written in many forms
_NUM_WRONG = 3  # right answers of other records, as wrong ones


# Wrong answers of other forms: some scorers pay a little for JSON that they can read.
_WRONG_OF_ANY = ("none of these", "0", "[]", "[[]]", "{}", '{"a": 0}', "[0, 0]", "True", "False")


def gym_attack(generator: str, *, mark: str, num_honest: int = NUM_HONEST) -> Attack:
    """Returns the attack on a generator's scorer."""
    numbers = range(num_honest + _NUM_WRONG)
    records = [{"generator": generator, "number": n, "config": {}} for n in numbers]
    made = [(*question_of(record), record) for record in records]
    questions = [
        AttackQuestion(
            name=f"{generator}/{number}",
            prompt=prompt,
            answer=answer,
            wrong=_others([other for _, other, _ in made], answer),
            record=record,
        )
        for number, (prompt, answer, record) in enumerate(made[:num_honest])
    ]
    return attack_of_records(
        [exploit for exploit in exploits() if exploit.task in TASKS],
        questions[:1],
        mark=mark,
        honest=[question for question in questions if question.answer.strip()],
    )


def _others(answers: Sequence[str], answer: str) -> tuple[str, ...]:
    """Returns other records' right answers, and some that are none of any record."""
    others = [other for other in dict.fromkeys(answers) if other != answer and other.strip()]
    return (*others[:_NUM_WRONG], *_WRONG_OF_ANY)
