"""What of a response is its program, and when printed text counts as the expected one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import golden
import pytest

from realsys.api.errors import DataError
from realsys.api.options import range_problems
from realsys.rewards.programs import code_tests
from realsys.rewards.programs.code_rule import CodeTests
from realsys.rewards.programs.code_tests import (
    CodeGrade,
    grade,
    last_code_block,
    program_of,
    same_output,
)
from realsys.rewards.sandbox.box_limits import BoxLimits, BoxOutcome

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (BLOCK, "print(1)\n"),
        (f"first\n{BLOCK}\nthen\n```py\nprint(2)\n```\ndone", "print(2)\n"),
        (f"{BLOCK}\nIt prints:\n```text\n1\n```", "print(1)\n"),
        ("```\nprint(3)\n```", "print(3)\n"),
        ("~~~python\nprint(4)\n~~~", "print(4)\n"),
        ("1. So:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        (f"{BLOCK}\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        (f"{BLOCK}\n```python\nprint('cut off", "print(1)\n"),
        ("```python\nprint('cut off", None),
        ("print(1)", None),
        ("", None),
        ("```python\n```", ""),
    ],
)
def test_the_last_fenced_block_is_the_program(response: str, program: str | None) -> None:
    assert last_code_block(response) == program


ADD, USE = "```python\ndef add(a, b):\n    return a + b\n```", "```python\nprint(add(1, 2))\n```"


@pytest.mark.parametrize(
    ("response", "first"),
    [
        (f"{ADD}\nUse it:\n{USE}", "def"),
        (f"```python\ndef add(a):\n    pass\n```\nBetter:\n{ADD}\n{USE}", "def add(a, b)"),
        (f"{ADD}\n```\n3\n```", "def"),
        ("```python\nadd = max\n```\n" + USE, "add ="),
        ("```python\nadd: object = max\n```\n" + USE, "add:"),
        ("```python\nclass A: ...\n```\n" + USE, "print"),  # none that the test uses: the last
        (USE, "print"),
    ],
)
def test_an_example_of_its_use_is_not_the_program(response: str, first: str) -> None:
    program = program_of(response, [{"code": "assert add(1, 2) == 3"}])
    assert program is not None
    assert program.startswith(first)
    assert program_of(ADD + "\n" + USE, [{"stdin": "", "stdout": "3"}]) == "print(add(1, 2))\n"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \n3\n\n", "1  2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("", "", True),
        ("1", "", False),
        ("0.3333333", "0.33333333333", True),
        ("1e-7", "0.0", True),
        ("0.334", "0.333", False),
        ("1000000.5", "1000000.0", True),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("nan", "0.5", False),
        ("inf", "0.5", False),
        ("abc", "0.5", False),
        ("Yes", "YES", False),
        ("123456789012345678", "123456789012345679", False),
    ],
)
def test_outputs_that_count_as_the_same(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


class _Boxes:
    """Stands in for a sandbox: gives outcomes by number of the test."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.asked: list[int] = []
        self.stop_at = stop_at

    def run_each(self, programs: Sequence[Any], **_: Any) -> list[BoxOutcome]:
        begin = sum(self.asked)
        self.asked.append(len(programs))
        outcomes = []
        for number in range(begin, begin + len(programs)):
            late = number == self.stop_at
            outcomes.append(
                BoxOutcome(
                    ended="wall_time" if late else "exit",
                    exit_code=None if late else 0,
                    signal=None,
                    stdout=f"{number}".encode(),
                    stderr=b"",
                    wall_s=1.0,
                    cpu_s=1.0,
                )
            )
            if late:
                break
        return outcomes


def graded(boxes: Any, count: int) -> CodeGrade:
    tests = [{"stdin": "", "stdout": str(n)} for n in range(count)]
    return grade(BLOCK, tests, boxes, BoxLimits())


def test_many_tests_take_several_boxes() -> None:
    boxes = _Boxes()
    assert graded(boxes, 600).passed == 600
    assert boxes.asked == [256, 256, 88]


def test_a_test_is_code_or_an_input() -> None:
    asked: list[Any] = []
    boxes: Any = SimpleNamespace(run_each=lambda programs, **_: asked.extend(programs) or [])
    grade(BLOCK, [{"code": "assert 1"}, {"stdin": "2", "stdout": ""}], boxes, BoxLimits())
    (code, of_code), given = asked
    assert code == code_tests.python_test_argv(code_tests.PROGRAM)
    assert json.loads(of_code)[1] == "assert 1"
    assert given == (code_tests.python_file_argv(code_tests.PROGRAM), b"2")


def test_tests_after_a_time_out_are_not_run() -> None:
    boxes = _Boxes(stop_at=3)
    found = graded(boxes, 600)
    assert (found.passed, len(found.tests), found.fraction) == (3, 600, 3 / 600)
    assert [test.why for test in found.tests[2:6]] == ["passed", "wall_time", "not_run", "not_run"]
    assert boxes.asked == [256]


def test_a_response_without_a_program_passes_nothing() -> None:
    boxes: Any = _Boxes()
    found = grade("no program", [{"code": "assert True"}], boxes, BoxLimits())
    assert (found.passed, boxes.asked) == (0, [])
    golden.check(found.tests[0].why)


@pytest.mark.parametrize(
    "tests",
    [
        [],
        [{"stdin": "1"}],
        [{"code": "x", "stdout": "1"}],
        [{"stdin": 1, "stdout": "1"}],
        [{"code": "pass"}, {}],
    ],
)
def test_what_is_no_test_is_refused(tests: list[dict[str, Any]]) -> None:
    boxes: Any = _Boxes()
    with pytest.raises(DataError):
        code_tests.grade(BLOCK, tests, boxes, BoxLimits())


SUMS = [{"stdin": "1\n2", "stdout": "3\n"}]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (SUMS, SUMS),
        (json.dumps(SUMS), SUMS),
        ({"inputs": ["1\n2"], "outputs": ["3\n"]}, SUMS),  # TACO, APPS
        (json.dumps({"inputs": [["1", "2"]], "outputs": ["3\n"]}), SUMS),
        ([{"input": "1\n2", "output": "3\n", "testtype": "stdin"}], SUMS),  # LiveCodeBench
        ([{"code": "assert f(1) == 1"}], [{"code": "assert f(1) == 1"}]),
        ({"inputs": ["1"], "outputs": []}, None),
        ({"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, None),
        ("no JSON", None),
        (None, None),
        (3, None),
    ],
)
def test_tests_are_read_as_data_sets_have_them(given: Any, read: Any) -> None:
    assert code_tests.read_tests(given) == read
    rule = CodeTests()
    if read is None:
        with pytest.raises(DataError):
            rule.check_record({"tests": given})
    else:
        rule.check_record({"tests": given})


def test_a_test_that_calls_a_function_is_told_as_what_it_is() -> None:
    test = {"input": "[1]", "output": "2", "testtype": "functional"}
    with pytest.raises(DataError) as refused:
        CodeTests().check_record({"tests": [test]})
    assert "testtype" in refused.value.what


@pytest.mark.parametrize(
    ("name", "least", "less"),
    [("boxes_at_once", 1, 0), ("mem", 32, 31), ("wall_s", 1e-9, 0.0), ("cpu_s", 1e-9, 0.0)],
)
def test_a_box_has_room_and_time(name: str, least: float, less: float) -> None:
    assert list(range_problems(CodeTests(**{name: least}))) == []
    assert [name in problem.where for problem in range_problems(CodeTests(**{name: less}))] == [
        True
    ]
