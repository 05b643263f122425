"""Honest programs and tests on them, as HumanEval, MBPP, APPS and others write such: all must pass."""

# ruff: noqa: E501
from __future__ import annotations

HONEST: dict[str, tuple[str, list[str]]] = {
    # ---- values -----------------------------------------------------------------------------
    "int": ("def f(x): return x * 2", ["assert f(3) == 6", "assert 6 == f(3)", "assert f(3) != 7"]),
    "large int": ("def f(n): return 7 ** n", ["assert f(9000) == 7 ** 9000", "assert f(0) == 1"]),
    "float": ("def f(x): return x / 3", ["assert abs(f(1) - 0.3333) < 1e-3", "assert f(3) == 1.0"]),
    "no number": ("def f(): return float('nan'), float('inf')", [
        "import math\nassert math.isnan(f()[0]) and f()[1] == math.inf"]),
    "complex": ("def f(z): return z.conjugate()", ["assert f(1 + 2j) == 1 - 2j"]),
    "bool": ("def f(x): return x > 0", ["assert f(1) is True", "assert not f(-1)"]),
    "numpy's bool": ("import numpy as np\ndef f(x): return np.bool_(x > 0)", [
        "assert f(1)", "assert not f(-1)", "assert f(1) == True"]),
    "nothing": ("def f(x): pass", ["assert f(1) is None", "assert f(1) == None"]),
    "text": ("def f(s): return s[::-1]", ["assert f('äb\\ud800') == '\\ud800bä'", "assert f('') == ''"]),
    "bytes": ("def f(b): return bytes(reversed(b))", ["assert f(b'\\x00\\xff') == b'\\xff\\x00'"]),
    "list": ("def f(n): return [[i] * i for i in range(n)]", ["assert f(3) == [[], [1], [2, 2]]"]),
    "tuple": ("def f(a, b): return b, a", ["assert f(1, 2) == (2, 1)", "x, y = f(1, 2)\nassert x == 2"]),
    "set": ("def f(a, b): return set(a) & set(b)", [
        "assert f([1, 2], [2, 3]) == {2}", "assert f('a', 'b') == set()"]),
    "frozen set": ("def f(a): return frozenset(map(tuple, a))", ["assert f([[1], [2]]) == {(1,), (2,)}"]),
    "dict": ("def f(s): return {c: s.count(c) for c in s}", ["assert f('aab') == {'a': 2, 'b': 1}"]),
    "keys of tuples": ("def f(): return {(1, (2, 3)): [4], None: {5}}", [
        "assert f()[1, (2, 3)] == [4] and f()[None] == {5}"]),
    "counter": ("from collections import Counter\ndef f(s): return Counter(s)", [
        "assert f('aab') == {'a': 2, 'b': 1}", "assert f('aab').most_common(1) == [('a', 2)]",
        "from collections import Counter\nassert f('ab') == Counter('ba')"]),
    "default dict": ("from collections import defaultdict\ndef f(a):\n    d = defaultdict(list)\n"
                     "    for k, v in a: d[k].append(v)\n    return d", [
        "assert f([(1, 2), (1, 3)]) == {1: [2, 3]}"]),
    "ordered dict and deque": ("from collections import OrderedDict, deque\n"
                               "def f(): return OrderedDict(a=1), deque([1, 2], maxlen=5)", [
        "d, q = f()\nassert list(d.items()) == [('a', 1)] and q.maxlen == 5 and list(q) == [1, 2]"]),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\n"
                    "def f(): return P(1, 2)", [
        "assert f() == (1, 2) and f().x == 1 and isinstance(f(), tuple)"]),
    "range": ("def f(n): return range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert f(3) == range(3)"]),
    "generator": ("def f(n):\n    for i in range(n): yield i * i", [
        "assert list(f(4)) == [0, 1, 4, 9]", "g = f(3)\nassert next(g) == 0 and sum(g) == 5",
        "g = f(1)\nnext(g)\ntry:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass"]),
    "map and zip": ("def f(a): return map(str, a), zip(a, a)", [
        "m, z = f([1, 2])\nassert list(m) == ['1', '2'] and dict(z) == {1: 1, 2: 2}"]),
    "views of a dict": ("def f(d): return d.keys(), d.values(), d.items()", [
        "k, v, i = f({'a': 1})\nassert k == {'a'} and list(v) == [1] and sorted(i) == [('a', 1)]",
        "assert 'a' in f({'a': 1})[0] and 'b' not in f({'a': 1})[0]"]),
    "fraction and decimal": ("from fractions import Fraction\nfrom decimal import Decimal\n"
                             "def f(): return Fraction(1, 3), Decimal('1.10')", [
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        "a, b = f()\nassert a + Fraction(2, 3) == 1 and b == Decimal('1.1')"]),
    "dates": ("import datetime\ndef f(d): return d + datetime.timedelta(days=1)", [
        "from datetime import date, datetime\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)\n"
        "assert f(datetime(2024, 1, 1, 5)).hour == 5"]),
    "arrays": ("import numpy as np\ndef f(a): return np.array(a) * 2", [
        "import numpy as np\nassert (f([1, 2]) == np.array([2, 4])).all()",
        "assert np.allclose(f([0.5]), [1.0])", "assert f([1]).tolist() == [2]",
        "import numpy\nassert f(numpy.arange(4).reshape(2, 2)).shape == (2, 2)"]),
    "numbers of numpy": ("import numpy as np\ndef f(a): return np.mean(a), np.int64(3)", [
        "assert f([1, 2]) == (1.5, 3)", "assert isinstance(f([1])[1], int)"]),
    "enumerations": ("import enum\nclass C(enum.Enum):\n    RED = 1\nclass N(enum.IntEnum):\n    ONE = 1\n"
                     "def f(): return C.RED\ndef g(): return N.ONE", [
        "assert f() == C.RED and f().name == 'RED' and f().value == 1", "assert g() == 1"]),
    "a value that holds itself": ("def f():\n    a = [1]\n    a.append(a)\n    return a", [
        "a = f()\nassert a[1] is a and len(a) == 2"]),
    "much data": ("def f(a): return sorted(a)", [
        "a = list(range(100000, 0, -1))\nassert f(a) == list(range(1, 100001))"]),
    # ---- calls ------------------------------------------------------------------------------
    "HumanEval": ("def has_close(numbers, threshold):\n    s = sorted(numbers)\n"
                  "    return any(b - a < threshold for a, b in zip(s, s[1:]))", [
        "METADATA = {'author': 'jt'}\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True\n"
        "    assert candidate([1.0, 2.0], 0.5) == False\n\ncheck(has_close)"]),
    "HumanEval with a helper of the program's": (
        "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n"
        "def find_zero(xs):\n    a, b = -1.0, 1.0\n    while poly(xs, a) * poly(xs, b) > 0: a *= 2; b *= 2\n"
        "    while b - a > 1e-10:\n        m = (a + b) / 2\n"
        "        a, b = (a, m) if poly(xs, a) * poly(xs, m) <= 0 else (m, b)\n    return a", [
        "def check(candidate):\n    import math, random, copy\n    rng = random.Random(42)\n"
        "    for _ in range(5):\n        r = rng.randint(-10, 10)\n        coeffs = [-r, 1]\n"
        "        solution = candidate(copy.deepcopy(coeffs))\n"
        "        assert math.fabs(poly(coeffs, solution)) < 1e-4\ncheck(find_zero)"]),
    "MBPP with imports": ("import math\ndef area(r): return math.pi * r * r", [
        "import math\nassert math.isclose(area(2), 12.566370614359172, rel_tol=0.001)",
        "assert math.isclose(area(1), math.pi)"]),
    "LeetCode": ("from typing import List\nclass Solution:\n"
                 "    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        seen = {}\n"
                 "        for i, n in enumerate(nums):\n            if target - n in seen:\n"
                 "                return [seen[target - n], i]\n            seen[n] = i", [
        "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]",
        "s = Solution()\nassert s.twoSum(nums=[3, 3], target=6) == [0, 1]"]),
    "in place": ("def f(a): a.sort(); a.append(0)", [
        "a = [3, 1]\nassert f(a) is None and a == [1, 3, 0]",
        "a = [[2, 1]]\nb = a[0]\nf(b)\nassert a == [[1, 2, 0]] and a[0] is b"]),
    "in place, dicts, sets and arrays": (
        "def f(d, s, a):\n    d['x'] = [1]\n    del d['y']\n    s |= {5}\n    a[0] = 9", [
        "import numpy as np\nd, s, a = {'y': 1}, {1}, np.zeros(2)\nf(d, s, a)\n"
        "assert d == {'x': [1]} and s == {1, 5} and a.tolist() == [9.0, 0.0]"]),
    "the argument itself": ("def f(a): a.append(1); return a\ndef g(a): return [a, a]", [
        "a = []\nassert f(a) is a and a == [1]", "b = g([1])\nassert b[0] is b[1]"]),
    "arguments of all kinds": ("def f(a, /, b=2, *c, d=4, **e): return a, b, c, d, e", [
        "assert f(1) == (1, 2, (), 4, {})", "assert f(1, 3, 5, d=6, x=7) == (1, 3, (5,), 6, {'x': 7})"]),
    "a function as argument": ("def f(g, a): return [g(x) for x in a]", [
        "assert f(lambda x: x + 1, [1, 2]) == [2, 3]", "assert f(len, ['a', 'bc']) == [1, 2]",
        "assert f(str.upper, ['a']) == ['A']", "seen = []\nf(seen.append, [1, 2])\nassert seen == [1, 2]",
        "import operator\nassert f(operator.neg, [1]) == [-1]", "assert f(int, ['3']) == [3]"]),
    "an iterator as argument": ("def f(a): return [x for x in a if x % 2]", [
        "assert f(iter([1, 2, 3])) == [1, 3]", "assert f(i * i for i in range(4)) == [1, 9]",
        "assert f(range(4)) == [1, 3]"]),
    "a function as result": ("def f(n):\n    def g(x): return x + n\n    return g", [
        "assert f(2)(3) == 5", "assert list(map(f(1), [1, 2])) == [2, 3]", "assert callable(f(1))"]),
    "decorators": ("import functools\ndef twice(g):\n    @functools.wraps(g)\n"
                   "    def h(*a): return g(*a) * 2\n    return h\n"
                   "@functools.lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)", [
        "@twice\ndef one(): return 1\nassert one() == 2", "assert fib(80) == 23416728348467685",
        "assert fib.__name__ == 'fib'"]),
    "recursion": ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", [
        "assert f(20000) == 20000"]),
    "lambdas and partials": ("from functools import partial\nadd = lambda a, b: a + b\ninc = partial(add, 1)", [
        "assert add(1, 2) == 3 and inc(4) == 5"]),
    "random numbers": ("import random\ndef f(seed):\n    random.seed(seed)\n    return random.random()", [
        "assert f(1) == f(1) != f(2)", "assert 0 <= f(3) < 1"]),
    # ---- errors -----------------------------------------------------------------------------
    "an error": ("def f(x):\n    if x < 0: raise ValueError('below 0')\n    return x", [
        "try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == 'below 0' and e.args == ('below 0',)\n"
        "else:\n    assert False",
        "import pytest\nwith pytest.raises(ValueError, match='below'):\n    f(-1)",
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError):\n    f(-1)"]),
    "an error of its own": ("class Empty(LookupError):\n    def __init__(self, n): self.n = n\n"
                            "    def __str__(self): return f'{self.n} left'\ndef f(): raise Empty(3)", [
        "try:\n    f()\nexcept Empty as e:\n    assert str(e) == '3 left' and e.n == 3\nelse:\n    assert 0",
        "try:\n    f()\nexcept LookupError:\n    pass\nelse:\n    assert 0"]),
    "errors with more": ("def f(d): return d['x']\ndef g(): open('/none')\ndef h(): raise SystemExit(3)\n"
                         "import json\ndef j(): json.loads('{')", [
        "try:\n    f({})\nexcept KeyError as e:\n    assert e.args == ('x',)",
        "try:\n    g()\nexcept FileNotFoundError as e:\n    assert e.errno == 2",
        "try:\n    h()\nexcept SystemExit as e:\n    assert e.code == 3",
        "import json\ntry:\n    j()\nexcept json.JSONDecodeError:\n    pass\nelse:\n    assert False"]),
    "a test's error through the program": ("def f(g):\n    try: return g()\n    finally: print('left')", [
        "class Own(Exception): pass\ndef g(): raise Own('x')\n"
        "try:\n    f(g)\nexcept Own as e:\n    assert e.args == ('x',)\nelse:\n    assert False"]),
    # ---- classes ----------------------------------------------------------------------------
    "a class": ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
                "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
                "    @property\n    def top(self): return self.items[-1]", [
        "s = Stack()\ns.push(1)\ns.push('a')\nassert len(s) == 2 and s.top == 'a' and s.pop() == 'a'\n"
        "assert s.items == [1] and isinstance(s, Stack)\ns.items = []\nassert len(s) == 0 and not s",
        "try:\n    Stack().pop()\nexcept IndexError:\n    pass\nelse:\n    assert False"]),
    "operators of a class": ("class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
                             "    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n"
                             "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
                             "    def __lt__(self, o): return self.x < o.x\n"
                             "    def __repr__(self): return f'V({self.x}, {self.y})'\n"
                             "    def __hash__(self): return hash((self.x, self.y))\n"
                             "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** .5\n"
                             "    def __getitem__(self, i): return (self.x, self.y)[i]", [
        "assert V(1, 2) + V(3, 4) == V(4, 6)", "assert abs(V(3, 4)) == 5.0 and str(V(1, 2)) == 'V(1, 2)'",
        "assert [v.x for v in sorted([V(2, 0), V(1, 0)])] == [1, 2]", "assert len({V(1, 2), V(1, 2)}) == 1",
        "assert V(1, 2)[1] == 2 and V(1, 2) != V(2, 1) and f'{V(1, 2)}' == 'V(1, 2)'"]),
    "a class that is a list": ("class Ring(list):\n    def turn(self): self.append(self.pop(0))\n    "
                               "\ndef f(a): return Ring(a)", [
        "r = f([1, 2, 3])\nr.turn()\nassert r == [2, 3, 1] and list(r) == [2, 3, 1] and len(r) == 3",
        "assert f([1]) + [2] == [1, 2] and 1 in f([1])"]),
    "data classes": ("from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    x: int\n"
                     "    tags: list = field(default_factory=list)\ndef f(): return P(1, ['a'])", [
        "assert f() == P(1, ['a']) and f().tags == ['a'] and f() < P(2)", "p = P(x=3)\nassert p.x == 3"]),
    "trees of the program's": ("class Node:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
                               "def f(head):\n    prev = None\n    while head:\n"
                               "        head.next, prev, head = prev, head, head.next\n    return prev", [
        "n = f(Node(1, Node(2, Node(3))))\nout = []\nwhile n:\n    out.append(n.val)\n    n = n.next\n"
        "assert out == [3, 2, 1]"]),
    "trees of the test's": ("def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))\n"
                            "def mark(t): t.val = t.val * 2; return t", [
        "class T:\n    def __init__(s, val, left=None, right=None): s.val, s.left, s.right = val, left, right\n"
        "t = T(1, T(2, None, T(3)))\nassert depth(t) == 3 and depth(None) == 0\n"
        "assert mark(t) is t and t.val == 2"]),
    "with": ("class Timer:\n    def __enter__(self): self.on = True; return self\n"
             "    def __exit__(self, *e): self.on = False; return e[0] is KeyError\n"
             "import contextlib\n@contextlib.contextmanager\ndef f(log):\n    log.append('in')\n    yield 5\n"
             "    log.append('out')", [
        "with Timer() as t:\n    assert t.on\nassert not t.on", "with Timer():\n    raise KeyError",
        "log = []\nwith f(log) as five:\n    assert five == 5"]),
    "class methods and constants": ("LIMIT = 10\nclass A:\n    N = {'a': [1]}\n    @classmethod\n"
                                    "    def make(cls): return cls()\n    @staticmethod\n    def two(): return 2", [
        "assert A.N == {'a': [1]} and A.two() == 2 and isinstance(A.make(), A) and LIMIT == 10"]),
    "copies": ("class A:\n    def __init__(self): self.x = [1]", [
        "import copy\na = A()\nb = copy.deepcopy(a)\nb.x = [2]\nassert a.x == [1] and b.x == [2]"]),
    "state": ("count = 0\ndef inc():\n    global count\n    count += 1\n    return count", [
        "inc()\ninc()\nassert count == 2"]),
    # ---- the surroundings ---------------------------------------------------------------------
    "printed text": ("def f(x): print('got', x); return x", [
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f(3)\n"
        "assert out.getvalue() == 'got 3\\n'", "assert f(1) == 1"]),
    "files": ("def f(name, text):\n    with open(name, 'w') as file: file.write(text)\n"
              "def g(path): return path.suffix", [
        "import os\nassert not os.path.exists('a.txt')\nf('a.txt', 'hi')\nassert open('a.txt').read() == 'hi'",
        "import os, pathlib\nassert not os.path.exists('a.txt')\nassert g(pathlib.Path('x.py')) == '.py'"]),
    "the program as a module": ("def add(a, b): return a + b\nPI = 3", [
        "from program import add\nassert add(1, 2) == 3", "import program\nassert program.PI == 3",
        "from program import *\nassert add(1, PI) == 4"]),
    "a main guard": ("def main(): print(input())\ndef f(): return 1\nif __name__ == '__main__':\n    pass", [
        "assert f() == 1"]),
    "its modules": ("import math, itertools, numpy as np\nfrom math import gcd\ndef f(): return 1", [
        "assert math.floor(1.5) == 1 and gcd(4, 6) == 2", "assert list(itertools.chain([1], [2])) == [1, 2]",
        "assert np.zeros(2).sum() == f() - 1"]),
    "threads": ("import threading\ndef f(n):\n    out = []\n    ts = [threading.Thread(target=out.append, args=(i,)) "
                "for i in range(n)]\n    [t.start() for t in ts]\n    [t.join() for t in ts]\n    return sorted(out)", [
        "assert f(4) == [0, 1, 2, 3]"]),
    "a loop of events": ("import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x\n"
                         "def f(x): return asyncio.run(g(x))", ["assert f(3) == 3"]),
    "text of Python": ("def f(x): return eval(x)", ["assert f('1 + 2') == 3"]),
    "approximately": ("def f(): return 0.1 + 0.2", [
        "import pytest\nassert f() == pytest.approx(0.3) and pytest.approx(0.3) == f()",
        "assert round(f(), 5) == 0.3 and f'{f():.2f}' == '0.30'",
        "import unittest\nunittest.TestCase().assertAlmostEqual(f(), 0.3)"]),
}  # fmt: skip
