"""Programs graded by their tests, in real boxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from honest_programs import HONEST

from realsys.rewards.programs.code_tests import CodeGrade, grade
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
        # each test finds the program as it was, and no other files
        (
            "import os\nseen = sorted(os.listdir('.') + os.listdir('/dev/shm'))\n"
            "for path in ('/box/x', '/dev/shm/x', '/tmp/x'): open(path, 'w').write('1')\n"
            "open('program.py', 'a').write('\\n1 / 0')\nos.mkdir('d')\nos.chmod('d', 0)\nos.chmod('.', 0)\n"
            "print(sum(map(int, input().split())) if seen == ['program.py'] else seen)",
            ["passed"] * 2,
        ),
        (
            "import os\nos.makedirs('/tmp/a/b/c')\nos.symlink('/usr', '/tmp/a/usr')\nos.mkfifo('f')\n"
            "for _ in range(1000):\n    os.mkdir('d')\n    os.chdir('d')\n"
            "print(sum(map(int, input().split())))",
            ["passed"] * 2,
        ),
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


def test_honest_programs_pass(sandbox: Sandbox) -> None:
    failed = {}
    for name, (program, tests) in HONEST.items():
        codes = tests if "files" in name else ["\n".join(tests)]  # each in a folder of its own
        found = grade(program, [{"code": t} for t in codes], sandbox, LIMITS, is_fenced=False)
        failed |= {f"{name}, {i}": t.why for i, t in enumerate(found.tests) if not t.passed}
    assert failed == {}
    assert len(HONEST) >= 60


# What tests compare; a program that does not know the right value must pass none.
COMPARED = [
    "assert f(1) == 2",
    "assert 2 == f(1)",
    "assert not f(1) != 2",
    "assert abs(f(1) - 2) < 1e-6",
    "assert abs(2 - f(1)) < 1e-6",
    "assert -1e-6 < f(1) - 2 < 1e-6",
    "assert 1.9 < f(1) < 2.1",
    "import math\nassert math.isclose(f(1), 2)",
    "assert f(1) in (2, 3)",
    "assert 2 in f(1)",
    "assert [2] == list(f(1))",
    "assert round(f(1), 3) == 2.0",
    "assert str(f(1)) == '2'",
    "assert f'{f(1):.1f}' == '2.0'",
    "assert f(1).startswith('ab')",
    "assert {2}.issubset(f(1))",
    "assert f(1) is True",
    "assert isinstance(f(1), int) and f(1) == 2",
    "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (3, 4)]))",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
    "done = unittest.TestResult()\nT('test').run(done)\nassert done.wasSuccessful()",
    "assert len(f(1)) == 2",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 2)",
    "import pytest\nassert f(1) == pytest.approx(2)",
    "import numpy as np\nassert np.allclose(f(1), [2.0])",
    "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'below 0'\nelse:\n    assert False",
]
ANYTHING = """
def same(*_): return True
def zero(*_): return 0
names = "eq ge gt le lt contains instancecheck bool".split()
words = "add sub mul truediv floordiv mod pow and or xor matmul".split()
binary = [p + n for n in words for p in ("", "r")]
members = {f"__{n}__": same for n in names} | {f"__{n}__": zero for n in binary}
members |= {"__ne__": lambda *_: False, "__hash__": zero, "__abs__": zero, "__int__": zero,
            "__float__": lambda s: 0.0, "__index__": zero, "__round__": zero, "__len__": zero,
            "__call__": lambda s, *a: s,
            "__iter__": lambda s: iter([s]), "__getattr__": lambda s, n: s, "__getitem__": lambda s, i: s,
            "__format__": lambda *_: "", "__str__": lambda s: "", "startswith": same, "endswith": same,
            "issubset": same, "issuperset": same, "__class__": property(lambda s: int)}
"""
CHEATS = {
    "equals all": ANYTHING + "f = lambda x: type('A', (), members)()",
    "an int that equals all": ANYTHING + "f = lambda x: type('A', (int,), members)(0)",
    "a float that equals all": ANYTHING + "f = lambda x: type('A', (float,), members)(0.0)",
    "a list that equals all": ANYTHING + "f = lambda x: type('A', (list,), members)([0])",
    "a text that equals all": ANYTHING + "f = lambda x: type('A', (str,), members)('')",
    "a class": ANYTHING + "f = type('f', (), members | {'__init__': lambda *_: None})",
    "anything of mock": "from unittest.mock import ANY\nf = lambda x: ANY",
    "Python's own functions": "import builtins\n"
    "for name in 'abs round sorted max min sum all any map'.split():\n"
    "    setattr(builtins, name, lambda *a: 2)\n    globals()[name] = lambda *a: 2\n"
    "builtins.AssertionError = Exception\nclass math: isclose = lambda *a: True\n"
    "import sys\nsys.modules['math'] = sys.modules['numpy'] = sys.modules['unittest'] = math\n"
    "f = lambda x: None",
    "the frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):\n"
    "            if isinstance(value, str) and name in ('secret', 'test', 'expected'): print(value)\n"
    "            if name == 'secret':\n                import hashlib\n"
    "                print(hashlib.sha256(value.encode() + b'reached').hexdigest())\n"
    "        frame = frame.f_back\n    import os; os._exit(0)",
    "all of its memory": "import gc, re, os\ndef f(x):\n"
    "    texts = [o for o in gc.get_objects() for o in (o.values() if isinstance(o, dict) else [o])]\n"
    "    found = [t for t in texts if isinstance(t, str) and 'assert' in t and 'f(1)' in t]\n"
    "    return 2 if found else 0",
    "the other process": "import os, re\ndef f(x):\n"
    "    for pid in filter(str.isdecimal, os.listdir('/proc')):\n"
    "        for path in ('fd/0', 'mem', 'environ', 'cwd/x', 'map_files'):\n            try:\n"
    "                if int(pid) not in (1, os.getpid()):\n"
    "                    open(f'/proc/{pid}/{path}', 'rb').read(1); return 2\n"
    "            except OSError: pass\n    os._exit(0)",
    "its own answer to all": "import socket, json, struct, os\ndef f(x):\n"
    "    s = socket.socket(fileno=os.dup(3))\n"
    "    for body in ({'root': [0], 'nodes': [['list', [True, []]]]}, {'what': 'call', 'root': [0], "
    "'nodes': [['list', [[1], 'x', {}]], ['class', 'type']]}, {'root': [0], 'nodes': []}):\n"
    "        raw = json.dumps(body).encode()\n        s.sendall(struct.pack('<Q', len(raw)) + raw)\n"
    "    return None",
    "what it can import there": "import os\nfor top in ('/tmp', '/box', '.'):\n"
    "    for name in ('numpy', 'unittest', 'pytest', 'math', 'program'):\n"
    "        open(f'{top}/{name}.py', 'w').write('print(1); import os; os._exit(0)')\n"
    "os.environ['PYTHONPATH'] = '/tmp'\nf = lambda x: None",
    "an end": "import os, atexit\nf = lambda x: os._exit(0)",
    "an end by signals": "import os, signal\nf = lambda x: os.kill(os.getppid(), signal.SIGTERM)",
    "an error": "def f(x): raise SystemExit(0)",
    "the end of an iteration": "def f(x): raise StopIteration",
    "a test to skip": "import unittest\ndef f(x): raise unittest.SkipTest",
    "output": "import os, sys\ndef f(x):\n    os.write(1, b'\\nreached\\n'); os._exit(0)",
}


@pytest.mark.parametrize(
    "program", CHEATS.values(), ids=[name.replace(" ", "_") for name in CHEATS]
)
def test_cheats_pass_nothing(sandbox: Sandbox, program: str) -> None:
    test = f"""
passed = []
for code in {COMPARED!r}:
    try:
        exec(code, globals())
    except Exception:
        continue
    passed.append(code)
assert passed
"""
    found = grade(program, [{"code": test}], sandbox, LIMITS, is_fenced=False)
    assert [verdict.why for verdict in found.tests] in (["exit 1"], ["wrong"], ["signal 15"])


def test_behind_a_tests_objects_a_program_finds_nothing(sandbox: Sandbox) -> None:
    program = """
def f(*given):
    found = []
    for thing in given:
        for name in ("__globals__ __code__ __closure__ __self__ __func__ __dict__ __wrapped__ func "
                     "gi_frame gi_code cr_frame f_back tb_frame tb_next __traceback__ args mro").split():
            for get in (getattr, lambda *it: thing._exchange.call("get", *it)):
                try:
                    found.append((name, str(get(thing, name))))
                except AttributeError:
                    pass
    for what, *given in (("name", "f"), ("base", given[0]), ("isinstance", given[0], int),
                         ("operate", "__init__", given[0]), ("set", given[2], "m", 1)):
        try:
            found.append((what, str(given[0]._exchange.call(what, *given))))
        except Exception:
            pass
    return found
"""
    test = """
import functools
class T:
    def m(self): return 1
def gen(): yield 1
assert f(lambda: 1, gen(), T(), T().m, functools.partial(gen), ValueError('x'), T, gen) == []
"""
    found = grade(program, [{"code": test}], sandbox, LIMITS, is_fenced=False)
    assert whys(found) == ["passed"]


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
