"""Which answers would do more than state a value, if Python evaluated them (pure).

Nine scorers of reasoning-gym evaluate the answer: four by ``eval``, five by sympy's ``parse_expr``. The
guard keeps what that runs away from everything else, but not from the scorer itself, which it could make
say 1. So these answers score 0 without being evaluated; all others are the scorer's to judge.
"""

from __future__ import annotations

import ast

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
    # sympy takes ``x!`` for a factorial, before Python parses it
    readings = {text.strip(), text.strip().replace("!", "")} if of_sympy else {text.strip()}
    return any(_does_more(reading, of_sympy) for reading in readings)


def _does_more(text: str, of_sympy: bool) -> bool:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the scorer's evaluation fails at it as well
    return any(_is_more(node, of_sympy) for node in ast.walk(tree))


def _is_more(node: ast.AST, of_sympy: bool) -> bool:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Constant):  # 2(x + 1): an error
            return False
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return not (of_sympy and (name in _FUNCTIONS or len(name) == 1))
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return of_sympy  # some of its functions evaluate a text again
    return isinstance(node, _DOES_MORE)
