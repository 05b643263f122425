"""Decides what an answer scores on which its rule failed: 0, or none, so that its record is set aside.

A rule that raises, that exceeds a limit or returns no finite number may do so because of the policy's
text: ``prime_factorization`` of reasoning-gym raises ValueError for all that is no list of numbers. Then
the answer scores 0 and is counted (``reward/raised``). Or the record or the rule is at fault; then there is
no score. The record's own right answer tells them apart: where the rule scores that, the text was at fault.

    the rule failed on an answer ── asked once more ──▶ a number
             │ again
             ├─ the record's known answer gets a number, in some common form ──▶ 0, counted
             ├─ there is no known answer, and most answers get a number ───────▶ 0, counted
             └─ else ──────────────────────────────────────────────────────────▶ no score

What is never the text's fault gets no score at once: an error of realsys (a judge without a grade, a box
that failed, a record without tests), a service or a file system that is away, and what an asynchronous rule
raises but for Python's own errors about values. Nothing here calls a rule: ``settlement`` yields the
answers that it wants scored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import replace

from realsys.api.basics.reward import RAISED, Completion, Score
from realsys.api.errors import RealsysError, RewardError, RewardServiceAway, WaitTimeout
from realsys.api.users_code.users_frames import shown_error, users_place
from realsys.rewards.guard.guarded import HOST_ENDED, CallFailed
from realsys.rewards.guard.guarded import RAISED as FUNCTION_RAISED

logger = logging.getLogger(__name__)

ScoredOrNot = Score | RewardError
Settlement = Generator[Sequence[Completion], list[ScoredOrNot], list[ScoredOrNot]]

SHOWN = 5  # first texts in the log; later ones at each doubling
_SHOWN_CHARACTERS = 200
_JUDGED = 4096  # records whose right answer was tried, kept in memory
_MANY = 64  # answers, of which most failing is worth a louder word

# Python's own errors about values, which a text can cause in a parser.
_OF_VALUES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
# Those of OSError that a text can cause, as a name of a file; the others are of the machine or the network.
_OF_NAMES = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_OF_NAMES_NUMBERS = (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)


class AnswerFailure(RewardError):
    """A rule gave no number for one answer, and the answer's text may be why.

    Attributes:
        exceeded_limit: of time or memory: asking once more would take as long.
    """

    exceeded_limit = False


def raised_error(error: BaseException, source: str, *, is_async: bool = False) -> RewardError:
    """Makes the error for an exception of a rule; an ``AnswerFailure`` where a text may have caused it."""
    what, where = describe(error, source)
    fix = "return a number for every text, 0 if it can't be read; what the record itself lacks: DataError"
    # A rule that evaluates answers is not asynchronous: no answer raises these.
    if is_async and isinstance(error, ConnectionError | WaitTimeout):
        return RewardServiceAway(what, where=where, fix=fix)
    if not may_be_the_texts(error, is_async=is_async):
        return RewardError(what, where=where, fix=fix)
    made = AnswerFailure(what, where=where, fix=fix)
    made.exceeded_limit = isinstance(error, CallFailed) and error.why != FUNCTION_RAISED
    return made


def may_be_the_texts(error: BaseException, *, is_async: bool) -> bool:
    """True if the text of an answer may have caused ``error`` in a rule."""
    if isinstance(error, RealsysError):
        return isinstance(error, AnswerFailure)
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    if isinstance(error, CallFailed) and error.why == HOST_ENDED:
        return False
    if isinstance(error, OSError):
        return type(error) in _OF_NAMES or (
            type(error) is OSError and error.errno in _OF_NAMES_NUMBERS
        )
    # An asynchronous rule asks a service, whose client has errors of its own. Broken JSON is the service's.
    return not is_async or (
        isinstance(error, _OF_VALUES) and not isinstance(error, json.JSONDecodeError)
    )


def describe(error: BaseException, source: str) -> tuple[str, str]:
    """Returns what was raised, the user's own line first, and where."""
    place = users_place(error)
    text = str(error) if isinstance(error, CallFailed) else shown_error(error)
    return f"{text} (raised by {source})"[:500], f"{place}, {source}" if place else source


def right_answers(answer: Completion) -> list[str]:
    """Returns the record's known answer in the forms that rules commonly read; none if it has none."""
    known, whole = answer.answer.strip(), str(answer.record.get("answer") or "").strip()
    if not (known := known or whole):
        return []
    forms = [known, whole, f"<answer>{known}</answer>", f"\\boxed{{{known}}}", f"#### {known}"]
    return [form for form in dict.fromkeys(forms) if form]


class RaisedAnswers:
    """Settles the failures of one rule in one process; counts them and shows the first texts in the log.

    Args:
        source: the rule, for messages.
        batched: it scores many answers in a call, so that one bad text fails them all.

    Attributes:
        num_scored: answers that got a number. num_raised: those that scored 0 since the rule failed.
    """

    def __init__(self, source: str, *, batched: bool = False) -> None:
        self._source, self._batched = source, batched
        self.num_scored = self.num_raised = self.num_unscored = 0
        self._is_scored: OrderedDict[str, bool] = (
            OrderedDict()
        )  # record → its right answer gets a number

    def settled(
        self,
        answers: Sequence[Completion],
        score: Callable[[Sequence[Completion]], list[ScoredOrNot]],
    ) -> list[ScoredOrNot]:
        """Scores answers by ``score``, in order, and settles those on which it failed; blocks."""
        steps = self.settlement(answers, score(answers))
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(score(wanted))
        except StopIteration as end:
            return list(end.value)

    async def settled_later(
        self,
        answers: Sequence[Completion],
        score: Callable[[Sequence[Completion]], Awaitable[list[ScoredOrNot]]],
    ) -> list[ScoredOrNot]:
        """As ``settled``, without blocking the event loop."""
        steps = self.settlement(answers, await score(answers))
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(await score(wanted))
        except StopIteration as end:
            return list(end.value)

    def settlement(self, answers: Sequence[Completion], found: Sequence[ScoredOrNot]) -> Settlement:
        """Returns ``found`` without ``AnswerFailure``; yields answers that are to be scored meanwhile."""
        results = list(found)
        self.num_scored += sum(isinstance(result, Score) for result in results)
        failed = [i for i, result in enumerate(results) if isinstance(result, AnswerFailure)]
        if self._batched and len(answers) > 1 and failed:
            yield from self._find_culprits(answers, results)
        else:
            for i in failed:
                if not results[i].exceeded_limit:  # type: ignore[union-attr]
                    (results[i],) = yield [answers[i]]
                    self.num_scored += isinstance(results[i], Score)
        for i, result in enumerate(results):
            if not isinstance(result, AnswerFailure):
                continue
            if (yield from self._is_the_texts(answers[i], answers, results)):
                results[i] = self._zero(answers[i], result)
            else:
                self.num_unscored += 1
                results[i] = self._no_score(answers[i], result)
        return results

    def _find_culprits(
        self, answers: Sequence[Completion], results: list[ScoredOrNot]
    ) -> Generator[Sequence[Completion], list[ScoredOrNot], None]:
        """Asks a batched rule about each answer alone, then about those together that it can score."""
        if not self.num_scored and not (yield from self._right_is_scored(answers[0])):
            return  # it has never given a number: not worth a call for each
        for i, answer in enumerate(answers):
            (results[i],) = yield [answer]
        good = [i for i, result in enumerate(results) if isinstance(result, Score)]
        together = (yield [answers[i] for i in good]) if good else []
        for i, result in zip(good, together, strict=True):
            self.num_scored += isinstance(result, Score)
            # What fails together and not alone is no text's fault.
            results[i] = _plain(result) if isinstance(result, RewardError) else result

    def _is_the_texts(
        self, answer: Completion, answers: Sequence[Completion], results: Sequence[ScoredOrNot]
    ) -> Generator[Sequence[Completion], list[ScoredOrNot], bool]:
        for other, result in zip(answers, results, strict=True):
            same = other.answer == answer.answer and other.record == answer.record
            if same and (answer.answer or answer.record) and _has_number(result):
                return True  # another answer to the same record has a number
        if right_answers(answer):
            return (yield from self._right_is_scored(answer))
        return self.num_scored > self.num_raised + self.num_unscored

    def _right_is_scored(
        self, answer: Completion
    ) -> Generator[Sequence[Completion], list[ScoredOrNot], bool]:
        key = _key(answer)
        if (known := self._is_scored.get(key)) is not None:
            return known
        is_scored = False
        for text in right_answers(answer):
            tokens = answer.token_ids or (0,)
            right = replace(
                answer, response=text, final=text, token_ids=tokens, finish_reason="stop"
            )
            (result,) = yield [right]
            if isinstance(result, Score):
                is_scored = True
                break
            if not isinstance(result, AnswerFailure):
                return False  # a service is away, say: nothing is known of the record
        self._is_scored[key] = is_scored
        while len(self._is_scored) > _JUDGED:
            self._is_scored.popitem(last=False)
        return is_scored

    def _zero(self, answer: Completion, failure: AnswerFailure) -> Score:
        self.num_raised += 1
        count, num_all = self.num_raised, self.num_raised + self.num_scored
        if count <= SHOWN or count & (count - 1) == 0:
            most = num_all >= _MANY and 2 * count > num_all
            logger.warning(
                "%s rule=%s num_raised=%d num_answers=%d why=%s answer=%r",
                "most answers score 0 since their rule fails on them: ask for the form that it reads"
                if most
                else "answer scored 0, its rule failed on it",
                *(self._source, count, num_all, failure.what),
                answer.response[-_SHOWN_CHARACTERS:],
            )
        return raised_score()

    def _no_score(self, answer: Completion, failure: AnswerFailure) -> RewardError:
        if not right_answers(answer):
            return _plain(failure)
        return RewardError(
            f"{failure.what}; the record's own right answer gets no number either",
            where=failure.where,
            fix=failure.fix,
        )


def raised_score(others: float = 0.0, parts: dict[str, float] | None = None) -> Score:
    """Returns the score of an answer on which a rule failed.

    Args:
        others: sum of the other rules' scores: failing must not pay where they are below 0.
        parts: theirs.
    """
    return Score(value=min(0.0, others), correct=False, parts={**(parts or {}), RAISED: 1.0})


def _has_number(result: ScoredOrNot) -> bool:
    return isinstance(result, Score) and RAISED not in result.parts


def _plain(error: RewardError) -> RewardError:
    made = RewardError(error.what, where=error.where, fix=error.fix)
    made.__cause__ = error.__cause__
    return made


def _key(answer: Completion) -> str:
    record = json.dumps([answer.answer, dict(answer.record)], sort_keys=True, default=str)
    return hashlib.blake2b(record.encode(errors="replace")).hexdigest()
