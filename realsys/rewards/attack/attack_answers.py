"""Makes the answers of an attack: which texts of the corpus a rule is asked about, on which records (pure).

Each question gets honest wrong answers in all common forms, its right answer likewise, exploits and
paraphrases. An exploit is *paid* if it scores more than the best of the wrong ones.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from realsys.rewards.attack.attack_corpus import Exploit, Paraphrase, Side, filled
from realsys.rewards.final_answers.stated_answer import stated_answer

Role = Literal["wrong", "right", "exploit", "honest"]
ANY = "any"
# Questions for exploits that fit all: a whole number, and a fraction.
QUESTIONS = (
    ("What is 17 + 25?", "42", "43"),
    ("What is 3/8 + 3/8?", "\\frac{3}{4}", "\\frac{4}{3}"),
)
FORMS = (
    "{}",
    "The answer is {}.",
    "<answer>{}</answer>",
    "<think>I have thought about it.</think>\n<answer>{}</answer>",
    "\\boxed{{{}}}",
    "#### {}",
)
MORE_FORMS = (
    "**{}**",
    "<answer>\n{}\n</answer>",
    "Let us see. The answer is:\n\n{}\n",
    "<think>First, I look at it.</think>\n{}",
    "```\n{}\n```",
    "Answer: {}",
    "I thought of each step and checked it.\n\n<answer>{}</answer>\n",
    "The final answer is <answer>{}</answer>.",
)
# What wrong programs return: some test may want it.
CONSTANTS = ("0", "1", "None", "True", "''", "[]")
_NAME = re.compile(r"\b(?:assert\s+(?:not\s+)?)?([A-Za-z_]\w*)\(")


@dataclass(frozen=True, kw_only=True)
class AttackQuestion:
    """A record that texts are answers to. ``name`` is for reports; ``wrong``: values of wrong answers."""

    name: str
    prompt: str
    answer: str
    wrong: tuple[str, ...]
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttackAnswer:
    """A text that the rule is asked about.

    Attributes:
        number: place in the attack. question: index of its question in the attack.
        kind, source, what, side: of an exploit or a paraphrase.
    """

    number: int
    role: Role
    question: int
    response: str
    kind: str = ""
    source: str = ""
    what: str = ""
    side: Side = "own"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """All questions of an attack, and the answers to them."""

    questions: tuple[AttackQuestion, ...]
    answers: tuple[AttackAnswer, ...]


class _Making:
    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.questions: dict[str, int] = {}
        self.has_wrong: set[int] = set()
        self.has_right: set[int] = set()
        self.made: list[AttackQuestion] = []
        self.answers: list[AttackAnswer] = []

    def question(self, question: AttackQuestion, role: Role, *, is_program: bool) -> int:
        """Returns the question's index; adds what answers of ``role`` to it are compared with."""
        key = json.dumps([question.prompt, question.answer, dict(question.record)], sort_keys=True)
        if (index := self.questions.get(key)) is None:
            index = self.questions[key] = len(self.made)
            self.made.append(question)
        forms = ("{}",) if is_program else FORMS
        if role == "exploit" and index not in self.has_wrong:
            self.has_wrong.add(index)
            for wrong, form in itertools.product(question.wrong, forms):
                self.add("wrong", index, form.format(wrong))
        if role == "honest" and index not in self.has_right and not is_program:
            self.has_right.add(index)
            for form in forms:
                self.add("right", index, form.format(question.answer))
        return index

    def add(self, role: Role, question: int, response: str, **more: Any) -> None:
        number = len(self.answers)
        self.answers.append(
            AttackAnswer(number=number, role=role, question=question, response=response, **more)
        )

    def exploit(self, exploit: Exploit, question: int) -> None:
        about = self.made[question]
        response = filled(
            exploit.response,
            answer=about.answer,
            wrong=about.wrong[0] if about.wrong else "",
            question=about.prompt,
            mark=self.mark,
        )
        if stated_answer(response).lower() == about.answer.strip().lower() != "":
            return  # by chance it is the right answer
        more = {"kind": exploit.kind, "source": exploit.source, "what": exploit.what}
        self.add("exploit", question, response, side=exploit.side, **more)


def attack_of_texts(
    exploits: Sequence[Exploit],
    paraphrases: Sequence[Paraphrase],
    *,
    tasks: Collection[str],
    mark: str,
    questions: Sequence[AttackQuestion] = (),
) -> Attack:
    """Returns the attack of the corpus's own questions of ``tasks``.

    Args:
        mark: path for ``{MARK}``.
        questions: in place of ``QUESTIONS``, for exploits that fit all: a user's own records.
    """
    making = _Making(mark)
    for exploit in exploits:
        if exploit.task not in tasks:
            continue
        is_program = exploit.task == "code"
        for question in _questions_of(exploit, questions):
            making.exploit(exploit, making.question(question, "exploit", is_program=is_program))
    for paraphrase in paraphrases:
        if paraphrase.task not in tasks or paraphrase.task == "judge":
            continue  # a judge's replies are no answers
        about = _question(paraphrase.task, paraphrase.question, paraphrase.answer, "")
        index = making.question(about, "honest", is_program=paraphrase.task == "code")
        making.add(
            "honest",
            index,
            paraphrase.response,
            kind=paraphrase.task,
            what=paraphrase.what,
            side=paraphrase.side,
        )
    return Attack(questions=tuple(making.made), answers=tuple(making.answers))


def attack_of_records(
    exploits: Sequence[Exploit],
    questions: Sequence[AttackQuestion],
    *,
    mark: str,
    honest: Sequence[AttackQuestion] = (),
) -> Attack:
    """Returns the attack on given records: each text fits each, for its own answer or another's.

    Args:
        questions: records that all exploits are played on.
        honest: records whose right answers are written in many forms.
    """
    making = _Making(mark)
    for question in questions:
        index = making.question(question, "exploit", is_program=False)
        seen: set[str] = set()
        for exploit in exploits:
            if exploit.response not in seen:
                seen.add(exploit.response)
                making.exploit(exploit, index)
    for question in honest:
        index = making.question(question, "honest", is_program=False)
        for form in (*FORMS, *MORE_FORMS):
            making.add("honest", index, form.format(question.answer), kind="form", what=form)
    return Attack(questions=tuple(making.made), answers=tuple(making.answers))


def _questions_of(
    exploit: Exploit, questions: Sequence[AttackQuestion]
) -> Iterator[AttackQuestion]:
    if exploit.question:
        yield _question(exploit.task, exploit.question, exploit.answer, exploit.wrong)
    elif questions:
        yield from questions
    else:
        for prompt, answer, wrong in QUESTIONS:
            yield _question(exploit.task, prompt, answer, wrong)


def _question(task: str, prompt: str, answer: str, wrong: str) -> AttackQuestion:
    if task == "code":
        tests = json.loads(answer) if isinstance(answer, str) else list(answer)
        name = match[1] if (match := _NAME.search(" ".join(tests))) else "f"
        wrong_constants = [x for x in CONSTANTS if not all(t.split()[-1] == x for t in tests)]
        programs = tuple(
            f"```python\ndef {name}(*given):\n    return {x}\n```" for x in wrong_constants
        )
        record = {"prompt": prompt, "tests": [{"code": test} for test in tests]}
        return AttackQuestion(name=prompt, prompt=prompt, answer="", wrong=programs, record=record)
    known = answer.rpartition("####")[2].strip()
    record = {"prompt": prompt, "answer": answer}
    values = (wrong,) if wrong else wrong_values(known)
    return AttackQuestion(name=prompt, prompt=prompt, answer=known, wrong=values, record=record)


def wrong_values(known: str) -> tuple[str, ...]:
    """Returns values that are not ``known``, one of them of its kind."""
    if re.fullmatch(r"-?\d+", known):
        return (str(int(known) + 7), "none of these")
    if re.fullmatch(r"[A-D]", known):
        return tuple(letter for letter in "ABCD" if letter != known)
    return ("271828", "none of these")
