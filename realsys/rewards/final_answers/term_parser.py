"""Parses the terms of a final answer: sums, fractions, roots, functions (pure).

A term is a tuple that begins with its kind: ``("number", Fraction, is_decimal)``, ``("name", text)``,
``("constant", "pi")``, ``("add", terms…)``, ``("divide", above, below)``, and so on.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from realsys.rewards.final_answers.answer_tokens import FUNCTIONS, Token

Term = tuple[Any, ...]
MAX_DEPTH = 25
_MAX_CYCLE = 30  # digits of a repeating decimal
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho"
    " sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
    " ell hbar angle triangle".split()
)


class Unparsed(Exception):
    """The text has no reading that is known here."""


class TermParser:
    """Reads tokens from the first to the last.

    Attributes:
        signs: number of plus-minus signs that were read.
    """

    def __init__(self, tokens: list[Token], depth: int = 0) -> None:
        self.tokens, self.at, self.depth, self.signs = list(tokens), 0, depth, 0

    def _peek(self) -> tuple[str, str]:
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "space":
            self.at += 1
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self.at += 1
        return token

    def _take(self, sign: str) -> bool:
        if self._peek() == ("sign", sign):
            self.at += 1
            return True
        return False

    def _want(self, sign: str) -> None:
        if not self._take(sign):
            raise Unparsed(sign)

    def _is_modulus(self) -> bool:
        """True for ``(\\bmod 7)`` or ``(mod 7)``."""
        following = [token for kind, token in self.tokens[self.at : self.at + 6] if kind != "space"]
        return "".join(following[1:4]).lstrip("\\").startswith("mod")

    def _is_aside(self) -> bool:
        """True before words in brackets, ``12 (twelve)``, or of a unit, ``8/day``."""
        return [kind for kind, _ in self.tokens[self.at + 1 : self.at + 2]] == ["words"]

    # ---- terms --------------------------------------------------------------------------------

    def _sum(self) -> Term:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unparsed("too deep")
        parts: list[Term] = []
        sign: str | None = "+"
        if self._peek()[1] in ("+", "-", r"\pm", r"\mp"):
            sign = self._next()[1]
        while sign is not None:
            parts.append(self._with_sign(sign, self._product()))
            kind, token = self._peek()
            sign = token if kind == "sign" and token in ("+", "-", r"\pm", r"\mp") else None
            if sign:
                self.at += 1
        self.depth -= 1
        return parts[0] if len(parts) == 1 else ("add", *parts)

    def _with_sign(self, sign: str, term: Term) -> Term:
        if sign == "+":
            return term
        if sign == "-":
            return ("number", -term[1], term[2]) if term[0] == "number" else ("neg", term)
        self.signs += 1
        return ("plusminus", 1 if sign == r"\pm" else -1, term)

    def _product(self) -> Term:
        term = self._power()
        while True:
            kind, token = self._peek()
            if kind == "sign" and token in ("*", r"\cdot", r"\times", r"\ast"):
                self.at += 1
                term = _times(term, self._factor())
            elif kind == "sign" and token in ("/", r"\div"):
                if self._is_aside():  # $8/day
                    return term
                self.at += 1
                term = ("divide", term, self._factor())
            elif self._begins_factor(kind, token):
                term = self._next_to(term, kind, token)
            else:
                return term

    def _next_to(self, term: Term, kind: str, token: str) -> Term:
        """Reads what stands behind ``term`` without a sign: a factor, or the fraction of a mixed number."""
        before = self.tokens[self.at - 1][0]
        if kind == "number" and (before == "letter" or (term[0] == "number" and before != "space")):
            raise Unparsed("two numbers, or x2")
        if kind == "number" and term[0] == "number":
            return self._mixed(term)
        factor = self._power()
        if not _is_mixed(term, factor, token):
            return _times(term, factor)
        sign = -1 if term[1] < 0 else 1
        return ("number", term[1] + sign * factor[1][1] / factor[2][1], False)

    def _mixed(self, whole: Term) -> Term:
        """Reads ``3 1/2`` behind its 3."""
        above = self._power()
        if not self._take("/"):
            raise Unparsed("two numbers")
        below = self._power()
        if above[0] != "number" or below[0] != "number" or not 0 < above[1] < below[1]:
            raise Unparsed("two numbers")
        sign = -1 if whole[1] < 0 else 1
        return ("number", whole[1] + sign * above[1] / below[1], False)

    def _factor(self) -> Term:
        if self._peek()[1] in ("+", "-"):
            return self._with_sign(self._next()[1], self._power())
        return self._power()

    def _begins_factor(self, kind: str, token: str) -> bool:
        if kind in ("number", "letter"):
            return True
        if kind != "sign":
            return False
        if token in ("(", "["):
            return not self._is_modulus() and not self._is_aside()
        if token in ("{", r"\lfloor", r"\lceil", r"\sqrt", r"\frac", r"\binom", r"\pi", r"\infty"):
            return True
        name = token[1:]
        if token.startswith("\\") and (name in FUNCTIONS or name in _GREEK):
            return True
        return name in (
            "overline",
            "vec",
            "hat",
            "bar",
            "mathbf",
            "dots",
            "ldots",
            "overrightarrow",
        )

    def _power(self) -> Term:
        term = self._postfix(self._atom())
        if self._peek() == ("sign", "^"):
            self.at += 1
            if self._is_degree():
                return self._postfix(("degree", term))
            if self._peek()[1] in ("'", r"\prime"):
                raise Unparsed("prime")
            term = ("power", term, self._exponent())
            term = self._postfix(term)
            if self._peek() == ("sign", "^"):
                self.at += 1
                term = ("power", term[1], ("power", term[2], self._exponent()))
        elif self._peek() == ("sign", r"\degree"):
            self.at += 1
            term = ("degree", term)
        return term

    def _postfix(self, term: Term) -> Term:
        while self._take("!"):
            term = ("factorial", term)
        return term

    def _is_degree(self) -> bool:
        start = self.at
        braced = self._take("{")
        if self._take(r"\circ") and (not braced or self._take("}")):
            return True
        self.at = start
        return False

    def _exponent(self) -> Term:
        if self._peek()[1] in ("+", "-"):
            return self._with_sign(self._next()[1], self._exponent())
        kind, token = self._peek()
        if kind in ("number", "letter"):
            self.at += 1
            return _leaf(kind, token)
        return self._postfix(self._atom())

    def _group(self) -> Term:
        """Reads ``{…}`` or one character, which is what LaTeX takes."""
        kind, token = self._peek()
        if token == "{" and kind == "sign":
            self.at += 1
            term = self._sum()
            self._want("}")
            return term
        if kind == "number":
            if len(token) > 1 and "." not in token:
                self.tokens[self.at] = ("number", token[1:])
                return ("number", Fraction(token[0]), False)
            self.at += 1
            return _leaf(kind, token)
        return self._atom()

    def _atom(self) -> Term:
        kind, token = self._next()
        if kind == "number":
            return self._decimal(token)
        if kind == "letter":
            return self._subscripted(_leaf(kind, token))
        if kind != "sign":
            raise Unparsed(token)
        if token in ("(", "[", "{"):
            term = self._sum()
            self._want({"(": ")", "[": "]", "{": "}"}[token])
            return ("group", term) if token == "(" and term[0] in ("plusminus",) else term
        if token in ("|", r"\lvert", r"\vert"):
            term = self._sum()
            self._want({"|": "|", r"\lvert": r"\rvert", r"\vert": r"\vert"}[token])
            return ("abs", term)
        if token == r"\lfloor":
            term = self._sum()
            self._want(r"\rfloor")
            return ("floor", term)
        if token == r"\lceil":
            term = self._sum()
            self._want(r"\rceil")
            return ("ceiling", term)
        if token == r"\frac":
            above = self._group()
            return ("divide", above, self._group())
        if token == r"\binom":
            above = self._group()
            return ("binomial", above, self._group())
        if token == r"\sqrt":
            return self._root()
        if token == r"\pi":
            return ("constant", "pi")
        if token == r"\infty":
            return ("constant", "infinity")
        name = token[1:]
        if token.startswith("\\") and name in _GREEK:
            return self._subscripted(("name", name))
        if token.startswith("\\") and name in FUNCTIONS:
            return self._function(name)
        if name in ("overline", "vec", "hat", "bar", "overrightarrow") and token.startswith("\\"):
            return ("name", f"{name} {self._raw_group()}")
        raise Unparsed(token)

    def _decimal(self, digits: str) -> Term:
        """Reads the rest of a number: ``0.1\\overline{6}`` is 1/6."""
        start = self.at
        has_point = "." in digits or self._take(".")
        if has_point and (self._take(r"\overline") or self._take(r"\bar")):
            cycle = self._raw_group()
            if not cycle.isdecimal() or len(cycle) > _MAX_CYCLE:
                raise Unparsed("cycle")
            places = len(digits.partition(".")[2])
            tail = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**places)
            return ("number", Fraction(digits) + tail, False)
        self.at = start
        return _leaf("number", digits)

    def _raw_group(self) -> str:
        self._want("{")
        text = ""
        while self._peek() != ("sign", "}"):
            kind, token = self._next()
            if kind == "end" or token in ("{", r"\frac"):
                raise Unparsed("group")
            text += token
        self.at += 1
        return text

    def _subscripted(self, term: Term) -> Term:
        if self._peek() != ("sign", "_"):
            return term
        self.at += 1
        text = self._raw_group() if self._peek()[1] == "{" else self._next()[1]
        return ("name", f"{term[1]}_{text}")

    def _root(self) -> Term:
        degree: Term = ("number", Fraction(2), False)
        if self._take("["):
            degree = self._sum()
            self._want("]")
        kind, token = self._peek()
        if kind == "number":  # \sqrt2, and \sqrt 18 as people write it
            self.at += 1
            return ("root", degree, _leaf(kind, token))
        return ("root", degree, self._group())

    def _function(self, name: str) -> Term:
        base: Term | None = None
        power: Term | None = None
        for _ in range(2):
            if self._peek() == ("sign", "_"):
                self.at += 1
                kind, token = self._peek()
                if kind == "number":
                    self.at += 1
                    base = _leaf(kind, token)
                else:
                    base = self._group()
            elif self._peek() == ("sign", "^"):
                self.at += 1
                power = self._exponent()
        if name in ("max", "min", "gcd", "lcm"):
            return self._of_many(name)
        kind, token = self._peek()
        if (kind, token) == ("sign", "(") or (kind, token) == ("sign", "{"):
            argument = self._postfix(self._atom())
            if self._peek() == ("sign", "^") and power is None:
                self.at += 1
                if self._is_degree():
                    argument = ("degree", argument)
                else:
                    power = self._exponent()
        else:
            argument = self._argument()
        term: Term = ("function", name, argument)
        if name == "sqrt":
            term = ("root", ("number", Fraction(2), False), argument)
        if base is not None:
            term = ("divide", ("function", "ln", argument), ("function", "ln", base))
        if power == ("number", Fraction(-1), False):
            if name not in ("sin", "cos", "tan"):
                raise Unparsed("inverse function")
            return ("function", f"arc{name}", argument)
        return term if power is None else ("power", term, power)

    def _argument(self) -> Term:
        """Reads what a function without brackets takes: ``2x``, up to the next function or sign."""
        term = self._power()
        while True:
            kind, token = self._peek()
            is_function = token.startswith("\\") and token[1:] in FUNCTIONS and token != r"\sqrt"
            if is_function or not self._begins_factor(kind, token) or token in ("(", "["):
                return term
            term = _times(term, self._power())

    def _of_many(self, name: str) -> Term:
        self._want("(")
        terms = [self._sum()]
        while self._take(","):
            terms.append(self._sum())
        self._want(")")
        return ("many", name, *terms)


def _leaf(kind: str, token: str) -> Term:
    if kind == "number":
        return ("number", Fraction(token), "." in token)
    if token in ("e", "i"):
        return ("constant", token)
    return ("name", token)


def _times(left: Term, right: Term) -> Term:
    if left[0] == "times":
        return (*left, right)
    return ("times", left, right)


def _is_mixed(whole: Term, part: Term, token: str) -> bool:
    r"""True for ``3\frac{1}{2}``, which is 3 + 1/2."""
    return (
        token == r"\frac"
        and whole[0] == "number"
        and whole[1].denominator == 1
        and not whole[2]
        and part[0] == "divide"
        and part[1][0] == part[2][0] == "number"
        and 0 < part[1][1] < part[2][1]
    )


def with_sign_of(term: Term, sign: int) -> Term:
    """Returns ``term`` with each plus-minus replaced by one of its signs."""
    if term[0] == "plusminus":
        inner = with_sign_of(term[2], sign)
        return inner if term[1] * sign > 0 else ("neg", inner)
    return tuple(with_sign_of(part, sign) if isinstance(part, tuple) else part for part in term)
