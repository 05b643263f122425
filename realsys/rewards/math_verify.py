"""Scores a worked answer by whether its final value equals the known one.

final_answers/final_value.py finds where a text states its final value: behind ``####``, in
``\\boxed{…}``, in ``<answer>``, else in its last words. Numbers, in all common spellings
(final_answers/plain_numbers.py), are compared exactly and fast. Other values are parsed to what they are, a
set, a pair, an equation (final_answers/math_forms.py), and compared by what they state
(final_answers/answer_comparison.py): exactly where fractions allow, else to 150 digits, in a separate
process (math_library.py, guard/), because generated text can make a library run for ever. What it can't
decide within ``CPU_S`` seconds of CPU time scores 0.

If a number is expected, only a number is an answer, never unevaluated arithmetic: ``86 - 3`` is 83, and
``18 - 6 =`` says 12, but a policy learns within a hundred steps to repeat the question. Where the
question is known, as data sets tell it (``question_text``), what people leave standing, ``2^{10}``, is a
number, unless the question states it (final_answers/question_again.py). In plain prose the last number
counts.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Sequence

from realsys.api.basics.thoughts import text_behind_thoughts
from realsys.rewards.final_answers.answer_comparison import Rationals, Undecided, same
from realsys.rewards.final_answers.answer_spelling import closed_up, spelt
from realsys.rewards.final_answers.answer_terms import is_worked_out
from realsys.rewards.final_answers.final_value import (
    MAX_CHARACTERS,
    Stated,
    final_value,
    last_amount,
    last_clause,
    last_formula,
    named_choice,
    stated_value,
)
from realsys.rewards.final_answers.math_forms import Form, readings
from realsys.rewards.final_answers.plain_numbers import (
    PlainNumber,
    last_number,
    plain_number,
    tidy,
)
from realsys.rewards.final_answers.question_again import is_question_again
from realsys.rewards.guard.guarded import RAISED, CallFailed, Guarded

__all__ = ["final_value", "math_verify_reward"]

logger = logging.getLogger(__name__)

CPU_S = 3.0  # the library needs milliseconds, or much longer than this
MEMORY_BYTES = 1 << 30  # the loaded libraries take 64 MiB of it
_MAX_LATEX_CHARACTERS = 100  # of a value that the library reads; 400 open brackets take it seconds
_MAX_KNOWN = 4096  # known answers that are kept parsed

_library = Guarded("realsys.rewards.math_library:is_one_of", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
LISTED = re.compile(r"[,;]\s{0,2}(?:\\[,; ]\s?)?[A-Za-z\\]|\b(?:or|and)\b")  # x = 5, y = 6
_num_stopped = itertools.count(1)


class _Known:
    """A known answer: its value's text, and what it is as a number without a unit, or as forms."""

    def __init__(self, text: str) -> None:
        self.text = text
        is_latex = "$" in text.replace("\\$", "").strip("$")
        self.number = None if is_latex else plain_number(tidy(text))

    @functools.cached_property
    def forms(self) -> tuple[Form, ...]:
        """What the text may stand for."""
        return tuple(readings(self.text))

    @functools.cached_property
    def spelling(self) -> str:
        """The text in one spelling, without idle spaces."""
        return closed_up(spelt(self.text))

    @functools.cached_property
    def is_number(self) -> bool:
        """True for a number that is worked out, with or without a unit."""
        kinds = ("term", "measure", "percent")
        return bool(self.forms) and self.forms[0][0] in kinds and is_worked_out(self.forms[0][1])


def math_verify_reward(*, response: str, answer: str, question: str = "") -> float:
    """Returns 1.0 if the final value of ``response`` equals that of ``answer``, else 0.0.

    With ``question``, what people leave standing is a number, ``2^{10}`` for 1024, and what only repeats
    the question scores 0: ``5!`` for 120 where ``5!`` is asked.

    Never raises: a response that can't be parsed, or on which the library fails, scores 0; so does one
    whose thoughts never end (realsys.api.basics.thoughts).
    """
    known = _known(answer)
    if not known.text:
        return 0.0
    stated = stated_value(text_behind_thoughts(response) or "")
    if known.number is not None and (number := _number_of(stated)) is not None:
        return float(number.equals(known.number))
    for text in _candidates(stated, known):
        if _is_right(text, known):
            return float(not is_question_again(text, known.forms, question))
    return 0.0


@functools.lru_cache(maxsize=_MAX_KNOWN)
def _known(answer: str) -> _Known:
    return _Known(final_value(answer))


def _number_of(stated: Stated) -> PlainNumber | None:
    """Returns the number that a text states; None: it isn't a single plain number."""
    if stated.is_marked or stated.is_anchored:
        left, _, value = stated.text.rpartition("=")
        return None if LISTED.search(left) else plain_number(tidy(value))
    if ("$" in stated.text or "\\" in stated.text) and last_formula(stated.text):
        return None
    return last_number(stated.text)


def _candidates(stated: Stated, known: _Known) -> list[str]:
    """Returns the texts that may be the value: one, unless prose leaves open where it begins."""
    if stated.is_marked or stated.is_anchored:
        return [stated.text]
    if formula := last_formula(stated.text):
        return [formula]
    if known.is_number:
        return [last_amount(stated.text)]
    texts = [stated.text, last_clause(stated.text)]
    if known.forms and known.forms[0][0] == "choice":
        texts.append(named_choice(stated.text))
    return texts


def _is_right(text: str, known: _Known) -> bool:
    spelling = closed_up(spelt(text))
    if spelling and spelling == known.spelling:
        return True
    if not known.forms:  # our own parser can't read what is known
        return len(text) <= _MAX_LATEX_CHARACTERS and _asked(text, known.text)
    if len(text) > MAX_CHARACTERS:
        return False
    is_right = _quickly(known.forms, readings(text))
    return _asked(text, known.text) if is_right is None else is_right


def _quickly(known: Sequence[Form], found: Sequence[Form]) -> bool | None:
    """True if two of the forms say the same, False if none do, as far as fractions go; else None."""
    terms, is_open = Rationals(), False
    for one, other in itertools.product(known, found):
        try:
            if same(one, other, terms):
                return True
        except Undecided:
            is_open = True
    return None if is_open else False


def _asked(found: str, known: str) -> bool:
    """True if the library considers the two equal."""
    try:
        return bool(_library.call(known=known, readings=[found]))
    except CallFailed as error:  # of generated text
        if error.why == RAISED:
            logger.debug("answer not parsed error=%s", error)
        elif (count := next(_num_stopped)) & (count - 1) == 0:  # 1, 2, 4, 8, …
            logger.warning(
                "answer scored 0 why=%s so_far=%d answer=%r", error.text, count, found[:100]
            )
        return False
