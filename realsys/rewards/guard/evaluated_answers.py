"""Which answers would do more than state a value, if Python evaluated them (pure).

Nine scorers of reasoning-gym evaluate the answer: four by ``eval``, five by sympy's ``parse_expr``. The
guard keeps what that runs away from everything else, but not from the scorer itself, which it could make
say 1. So these answers score 0 without being evaluated; all others are the scorer's to judge.
"""

from __future__ import annotations

import ast
import builtins
import re

BY_EVAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
BY_SYMPY = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
_FUNCTIONS = frozenset(
    """
    Abs Add Integer Max Min Mul Pow Rational abs acos acosh acot acsc asec asin asinh atan atan2 atanh
    binomial cbrt ceiling cos cosh cot coth csc csch erf erfc exp factorial floor gamma im ln log max min
    pow re root round sec sech sign sin sinh sqrt tan tanh
    """.split()
)
_PYTHONS = frozenset(dir(builtins))
_FACTORIAL = re.compile(r"!(?!=)")
_CALLED = re.compile(r"([^\W\d]\w*+)\s*+\(")
# Texts, attributes, hidden names, and what begins a function or a loop
_MORE = re.compile(
    r"[\"'`@;]|__|\.\s*+[^\W\d]|\b(?:for|lambda|import|while|await|yield|def|class)\b"
)
_DOES_MORE = (
    ast.Attribute,
    ast.Await,
    ast.DictComp,
    ast.GeneratorExp,
    ast.JoinedStr,
    ast.Lambda,
    ast.ListComp,
    ast.NamedExpr,
    ast.SetComp,
    ast.Yield,
    ast.YieldFrom,
)


def does_more_than_state(generator: str, text: str) -> bool:
    """True if the scorer of ``generator`` evaluates ``text``, and that would call or look up something.

    Calls of elementary functions are values: ``sin(x)``.
    """
    if generator not in BY_EVAL and generator not in BY_SYMPY:
        return False
    of_sympy = generator in BY_SYMPY
    readings = {text.strip()}
    if of_sympy:  # which takes ``x!`` for a factorial before Python parses it, and leaves ``!=``
        readings.add(_FACTORIAL.sub("", text.strip()))
    trees = [_parsed(reading) for reading in readings]
    if all(tree is None for tree in trees):
        # The scorer may rewrite it to what Python parses: nothing that could do more is let through
        return _may_do_more(text, of_sympy)
    return any(_does_more(tree, of_sympy) for tree in trees if tree is not None)


def _parsed(text: str) -> ast.AST | None:
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _does_more(tree: ast.AST, of_sympy: bool) -> bool:
    return any(_is_more(node, of_sympy) for node in ast.walk(tree))


def _may_do_more(text: str, of_sympy: bool) -> bool:
    if _MORE.search(text):
        return True
    # Other names than Python's own are symbols, or unknown: prose and LaTeX have brackets behind words
    allowed = _FUNCTIONS if of_sympy else frozenset()
    return any(name in _PYTHONS - allowed for name in _CALLED.findall(text))


def _is_more(node: ast.AST, of_sympy: bool) -> bool:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Constant):  # 2(x + 1): an error
            return False
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return not (of_sympy and (name in _FUNCTIONS or len(name) == 1))
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return of_sympy  # some of its functions evaluate a text again
    return isinstance(node, _DOES_MORE)
