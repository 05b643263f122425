"""Programs graded by their tests, in real boxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from realsys.rewards.code_tests import CodeGrade, grade
from realsys.rewards.sandbox.box_limits import BoxLimits
from realsys.rewards.sandbox.sandbox import Sandbox

LIMITS = BoxLimits(wall_s=30, cpu_s=1, memory_bytes=256 << 20)
PAIRS = [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "2 5\n", "stdout": "7"}]
ASSERTS = [{"code": "assert add(1, 2) == 3"}, {"code": "assert add(2, 5) == 7"}]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as made:
        yield made


def whys(found: CodeGrade) -> list[str]:
    return [test.why for test in found.tests]


def graded(sandbox: Sandbox, code: str, tests: list[dict[str, str]]) -> list[str]:
    return whys(grade(f"Here:\n```python\n{code}\n```\n", tests, sandbox, LIMITS))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(sum(map(int, input().split())))", ["passed", "passed"]),
        ("a, b = map(int, input().split())\nprint(3)", ["passed", "wrong"]),
        ("print(1 / 0)", ["exit 1", "exit 1"]),
        ("import os; print(3); os.abort()", ["signal 6", "signal 6"]),
        ("while True: pass", ["cpu_time", "not_run"]),
        ("print('3' * (2 << 20))", ["output", "output"]),
        ("x = [0] * (1 << 40)", ["exit 1", "exit 1"]),
        ("def f(:", ["exit 1", "exit 1"]),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", ["passed"] * 2),
        # leaves files for the next test: only its own answers
        ("open('x', 'a').write('1'); print(open('x').read())", ["wrong", "wrong"]),
    ],
)
def test_pairs_of_input_and_output(sandbox: Sandbox, code: str, expected: list[str]) -> None:
    assert graded(sandbox, code, PAIRS) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def add(a, b):\n    return a + b", ["passed", "passed"]),
        ("def add(a, b):\n    return 3", ["passed", "exit 1"]),
        ("import sys\nadd = lambda a, b: a + b\nprint('noise')", ["passed", "passed"]),
        ("import sys; sys.exit(0)", ["wrong", "wrong"]),
        ("import os; os._exit(0)", ["wrong", "wrong"]),
        ("import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit", ["wrong", "wrong"]),
        ("import sys; print(sys.stdin.read(), sys.argv); sys.exit(0)", ["wrong", "wrong"]),
        ("def add(a, b):\n    raise SystemExit(0)", ["wrong", "wrong"]),
        ("def add(a, b):\n    while True: pass", ["cpu_time", "not_run"]),
        ("", ["exit 1", "exit 1"]),
        # looks for the test in the files of its box
        ("import os, sys; print(os.listdir('.'))\nassert os.listdir('.') == ['program.py']\n"
         "def add(a, b):\n    return a + b", ["passed", "passed"]),
    ],
)  # fmt: skip
def test_asserts_on_the_program(sandbox: Sandbox, code: str, expected: list[str]) -> None:
    assert graded(sandbox, code, ASSERTS) == expected


def test_both_kinds_together_and_text_that_is_no_unicode(sandbox: Sandbox) -> None:
    tests = [PAIRS[0], {"code": "assert True"}]
    code = "import sys\ntext = sys.stdin.read()\nprint(3) if text else None"
    assert graded(sandbox, code, tests) == ["passed", "passed"]
    assert graded(sandbox, "print('\ud800')", tests) == ["wrong", "passed"]


def test_expected_outputs_are_not_in_the_box(sandbox: Sandbox) -> None:
    look = """
import os, sys
sys.stdin.read()
names = [os.path.join(f, n) for r in ("/box", "/tmp") for f, _, ns in os.walk(r) if ".venv" not in f
         for n in ns]
found = [n for n in names if "the_" + "answer" in open(n, errors="replace").read()]
print(found, [v for v in os.environ.values() if "the_" + "answer" in v])
"""
    found = grade(
        f"```python\n{look}\n```", [{"stdin": "", "stdout": "the_answer"}] * 2, sandbox, LIMITS
    )
    assert whys(found) == ["wrong", "wrong"]
    empty = grade(
        f"```python\n{look}\n```", [{"stdin": "", "stdout": "[] []"}] * 2, sandbox, LIMITS
    )
    assert whys(empty) == ["passed", "passed"]
