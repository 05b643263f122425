"""Grades a program in a response by its tests, in a sandbox.

A test is ``{"stdin": …, "stdout": …}``: the program, run anew, must print that; or ``{"code": …}``:
Python such as asserts, which finds the program's global names and must come to its end.

What a program should print is compared here, never in the box. A test's code runs beside the program, in
a process that this can't touch, and compares plain values: an object that equals everything equals nothing
there (realsys/rewards/sandbox/separate_tests; what such a test can't do is in docs/code_tasks.md). Each
test finds the program and no other files.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import DataError
from realsys.rewards.programs.fenced_blocks import fenced_blocks, last_block
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome, Ended
from realsys.rewards.sandbox.sandbox import (
    MOST_PROGRAMS,
    Sandbox,
    python_file_argv,
    python_test_argv,
)
from realsys.rewards.sandbox.separate_tests.separate_test import reached_line

PROGRAM = "program.py"
# After these, further tests are not run: an endless loop costs its time limit once.
_STOP_AFTER: tuple[Ended, ...] = ("wall_time", "cpu_time")
_PYTHON = ("python", "python3", "py", "")
# Names that a test may use, and those that the lines of a program define.
_NAME = re.compile(r"[^\W\d]\w*+")
_DEFINED = re.compile(
    r"^(?:(?:async +)?def +(\w++)|class +(\w++)|(\w++) *(?::[^=\n]*+)?=(?!=))", re.M
)
_NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?$")
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict:
    """What one test of a program came to."""

    passed: bool
    why: str  # passed, wrong, exit 1, signal 11, wall_time …, not_run
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeGrade:
    """How many tests a program passes."""

    tests: tuple[CaseVerdict, ...]  # in the order given

    @property
    def passed(self) -> int:
        """Tests passed."""
        return sum(test.passed for test in self.tests)

    @property
    def fraction(self) -> float:
        """The share of tests passed, from 0 to 1."""
        return self.passed / len(self.tests)


def last_code_block(response: str, languages: Collection[str] = _PYTHON) -> str | None:
    """Returns the last fenced block of a language, else of none; None if there is neither."""
    return last_block(response, languages)


def program_of(response: str, tests: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the last block of Python that defines a name which a test uses; else the last block.

    So an example of its use, behind a program, is not taken for one. None: there is no block.
    """
    used = {name for test in tests for name in _NAME.findall(test.get("code", ""))}
    for block in reversed(fenced_blocks(response)):
        if block.is_closed and block.language in _PYTHON:
            defined = {name for names in _DEFINED.findall(block.text) for name in names}
            if defined & used:
                return block.text
    return last_code_block(response)


def grade(
    response: str,
    tests: Sequence[Mapping[str, Any]],
    sandbox: Sandbox,
    limits: BoxLimits,
    *,
    is_fenced: bool = True,
) -> CodeGrade:
    """Runs the program of ``response`` on its tests, all in one box; ``limits`` are of each test.

    The program is that of ``program_of``, without which none passes; or, not ``is_fenced``, the whole.

    Raises:
        DataError: a test is of neither kind, or there is none.
        SandboxFailure: a box failed; the response was not judged.
    """
    check_tests(tests)
    program = program_of(response, tests) if is_fenced else response
    if program is None:
        missing = CaseVerdict(passed=False, why="no program in the response")
        return CodeGrade(tests=(missing,) * len(tests))
    verdicts: list[CaseVerdict] = []
    for begin in range(0, len(tests), MOST_PROGRAMS):
        part = tests[begin : begin + MOST_PROGRAMS]
        verdicts += _verdicts(program, part, sandbox, limits)
        if len(verdicts) < begin + len(part):
            break
    not_run = CaseVerdict(passed=False, why="not_run")
    return CodeGrade(tests=(*verdicts, *[not_run] * (len(tests) - len(verdicts))))


def _verdicts(
    program: str, tests: Sequence[Mapping[str, Any]], sandbox: Sandbox, limits: BoxLimits
) -> list[CaseVerdict]:
    """Runs tests in one box; the list is shorter if a time limit ended it."""
    files = {PROGRAM: program.encode(errors="replace")}
    secret = secrets.token_hex(16)
    reached = reached_line(secret)
    programs: list[tuple[list[str], bytes]] = []
    for test in tests:
        if "code" in test:
            programs.append(
                (python_test_argv(PROGRAM), json.dumps([secret, test["code"]]).encode())
            )
        else:
            programs.append((python_file_argv(PROGRAM), str(test["stdin"]).encode()))
    outcomes = sandbox.run_each(
        programs, files=files, limits=limits, stop_after=_STOP_AFTER, anew=True
    )
    return [
        _verdict(outcome, test, reached) for outcome, test in zip(outcomes, tests, strict=False)
    ]


def _verdict(outcome: BoxOutcome, test: Mapping[str, Any], reached: str) -> CaseVerdict:
    """Judges one outcome; ``reached`` is the last line of a test by code that came to its end."""
    text = outcome.stdout.decode(errors="replace")
    if not outcome.succeeded:
        status = outcome.exit_code if outcome.ended == "exit" else outcome.signal
        why = outcome.ended if status is None else f"{outcome.ended} {status}"
        return CaseVerdict(passed=False, why=why, wall_s=outcome.wall_s)
    by_code = "code" in test
    passed = text.rstrip().endswith(reached) if by_code else same_output(text, test["stdout"])
    return CaseVerdict(passed=passed, why="passed" if passed else "wrong", wall_s=outcome.wall_s)


def same_output(printed: str, expected: str) -> bool:
    """Compares line by line and word by word; decimal fractions may differ by 1e-6.

    Blanks at the ends of lines and empty lines at the end do not count.
    """
    lines, wanted = (
        [line.split() for line in t.rstrip().splitlines()] for t in (printed, expected)
    )
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not _NUMBER.match(wanted):  # only what is expected as a fraction is compared as a number
        return False
    try:
        difference = abs(float(word) - float(wanted))
    except ValueError:
        return False
    return difference <= _TOLERANCE * max(1.0, abs(float(wanted)))


def read_tests(given: Any) -> list[Any] | None:
    """Returns a record's tests as ``check_tests`` wants them; None: these are none.

    They may be JSON in a text; ``{"inputs": […], "outputs": […]}``, as TACO and APPS have them; or a list
    of ``{"input": …, "output": …}``, as LiveCodeBench has those of programs that read and print.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    if isinstance(given, Mapping) and not given.get("fn_name"):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if not (isinstance(inputs, list) and isinstance(outputs, list)):
            return None
        if len(inputs) != len(outputs):
            return None
        pairs = zip(inputs, outputs, strict=True)
        return [{"stdin": _lines(i), "stdout": _lines(o)} for i, o in pairs]
    return [_read_test(test) for test in given] if isinstance(given, list) else None


def _read_test(test: Any) -> Any:
    if not isinstance(test, Mapping) or not {"input", "output"} <= set(test):
        return test
    if set(test) - {"input", "output", "testtype"} or test.get("testtype", "stdin") != "stdin":
        return test  # it calls a function, or is of another kind: told as what it is
    return {"stdin": _lines(test["input"]), "stdout": _lines(test["output"])}


def _lines(text: Any) -> Any:
    """Returns a text that may be a list of its lines."""
    is_list = isinstance(text, list) and all(isinstance(line, str) for line in text)
    return "\n".join(text) if is_list else text


def check_tests(tests: Sequence[Mapping[str, Any]]) -> None:
    """Refuses what is no test: a program must not pass, or fail, for want of tests."""
    kinds = ({"code"}, {"stdin", "stdout"})
    for number, test in enumerate(tests):
        fields = set(test) if isinstance(test, Mapping) else set()
        if fields not in kinds or not all(isinstance(text, str) for text in test.values()):
            shown = f"has the fields {sorted(fields)}" if fields else f"is {test!r:.60}"
            raise DataError(
                f"test {number} {shown}",
                where="tests of a record",
                fix='a test is {"stdin": text, "stdout": text} or {"code": text}',
            )
    if not tests:
        raise DataError(
            "a record has no tests", where="tests of a record", fix="leave such records out"
        )
