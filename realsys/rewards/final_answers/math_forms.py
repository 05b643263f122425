"""Parses a final answer, in LaTeX or text, to what it is: a set, a pair, an equation (pure).

A form is a tuple that begins with its kind:

    ("list", forms)               1, 2        x = 1 or x = 2
    ("set", forms)                \\{1, 2\\}
    ("tuple", "()", forms)        (1, 2)  [1, 2)       an interval or a tuple: the reader of both decides
    ("matrix", rows of forms)
    ("cup" | "cap" | "setminus", forms)
    ("equation", sides)           y = 2x + 3
    ("inequality", signs, sides)  1 <= x < 2
    ("either" | "both", forms)    x < 1 or x > 2
    ("in", name, form)            x \\in [1, 2)
    ("ratio", terms)              2:3
    ("choice", letter, form)      (B) 12; the form may be None
    ("text", words)
    ("measure", term, unit)       5 cm
    ("based", digits, base)       101_2
    ("modulo", term, modulus)     3 \\pmod 7
    ("term", term)

A term is an expression, also a tuple: ``("number", Fraction, is_decimal)``, ``("name", text)``,
``("add", …)`` and so on. The text must be short: nothing here reads more than ``MAX_CHARACTERS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from realsys.rewards.final_answers.answer_spelling import spelt
from realsys.rewards.final_answers.measures import NO_UNIT, is_unit, unit_of

Form = tuple[Any, ...]
Term = tuple[Any, ...]
MAX_CHARACTERS = 500
_MAX_DEPTH = 25
_WORDS = (
    r"text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathsf|mathit|mathtt|mbox|hbox"
    r"|operatorname\*?|boldsymbol|bm|emph"
)
TOKENS = re.compile(
    rf"\\(?P<words>{_WORDS})\s*\{{(?P<content>[^{{}}]{{0,200}})\}}"
    r"|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<command>\\(?:[A-Za-z]+|.))"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<space>\s+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
CHOICE = re.compile(r"\\?(?:text|textbf|mathrm|mathbf)?\s*\{?\s*\(\s*([A-J])\s*\)\s*\}?[\s:.]*")
CHOICE_POINT = re.compile(r"([A-J])\s*[).:]\s+(?=\S)")
BASE = re.compile(r"\(?\s?(?:in )?base\s{1,3}(\d{1,2})\s?\)?")
LETTER = re.compile(r"\(?\s*([A-J])\s*\)?[.:]?")
WORDS = re.compile(r"[^\W\d_](?:[\w '\-.,&/]*[^\W_])?")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp sqrt max min gcd lcm"
    " det arg Re Im".split()
)
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho"
    " sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
    " ell hbar angle triangle".split()
)
_RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\lt": "<",
              r"\gt": ">", r"\in": "in", r"\equiv": "==", r"\approx": "~", r"\to": "to"}  # fmt: skip
_MONEY = {r"\$": "dollar", "€": "euro", "£": "sterling", "₹": "rupee", "¥": "yen"}
_SMALL_WORDS = frozenset("of in a at on by for is per the".split())
_OPEN, _CLOSE = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}
UNIT_LETTERS = frozenset("mgshltLNJWVCF")
_JOINTS = {"and", "or"}


class Unparsed(Exception):
    """The text has no reading that is known here."""


def readings(text: str) -> list[Form]:
    """Returns the forms that ``text`` may stand for, the likeliest first; none if it has none.

    ``5 m`` is five metres, or five times m.
    """
    text = spelt(text)
    if not text or len(text) > MAX_CHARACTERS:
        return []
    forms: list[Form] = []
    for takes_units in (True, False):
        try:
            form = _Parser(text, takes_units).whole()
        except (Unparsed, RecursionError, ValueError, OverflowError, ZeroDivisionError):
            continue
        if form not in forms:
            forms.append(form)
    if (words := words_of(text)) and ("text", words) not in forms:
        forms.append(("text", words))
    return forms


def words_of(text: str) -> str:
    """Returns the words of a text without LaTeX's commands, in lower case; "" if it has other signs."""
    content = []
    for found in TOKENS.finditer(text):
        if found["words"]:
            content.append(found["content"])
        elif found["command"]:
            if found["command"] not in (r"\ ", "\\\\", r"\&"):
                return ""
            content.append(" ")
        elif found["sign"] in ("$", "{", "}"):
            continue
        else:
            content.append(found[0])
    words = " ".join("".join(content).lower().split()).strip(" .,;:!?\"'")
    if not WORDS.fullmatch(words):
        return ""
    first, _, rest = words.partition(" ")
    return rest if rest and first in ("a", "an", "the", "on") else words


class _Parser:
    def __init__(self, text: str, takes_units: bool) -> None:
        self.text, self.takes_units = text, takes_units
        self.tokens = self._tokens(text)
        self.at, self.depth, self.signs = 0, 0, 0

    # ---- tokens -------------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[tuple[str, str]]:
        if "(" not in text and "[" not in text and "{" not in text:
            text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
        else:
            text = _with_thousands_outside(text)
        tokens: list[tuple[str, str]] = []
        for found in TOKENS.finditer(text):
            if found["words"]:
                tokens += self._content(found["content"], _ends_value(tokens))
            elif found["number"]:
                tokens.append(("number", found["number"]))
            elif found["command"]:
                tokens.append(("sign", found["command"]))
            elif found["letters"]:
                tokens += self._letters(found["letters"], tokens)
            elif found["space"]:
                tokens.append(("space", " "))
            else:
                tokens.append(("sign", found["sign"]))
        return tokens

    def _content(self, content: str, follows_value: bool) -> list[tuple[str, str]]:
        """Tokens of ``\\text{…}``: mathematics, or words."""
        stripped = content.strip(" ~")
        if stripped == "to":
            return [("sign", ":")]
        if stripped.lower().strip(" ,") in _JOINTS:
            return [("joint", stripped)]
        if not stripped:
            return [("space", " ")]
        if len(stripped) == 1 and stripped.isalpha():
            is_counted = self.takes_units and follows_value and stripped in UNIT_LETTERS
            return [("words" if is_counted else "letter", stripped)]
        if self.takes_units and follows_value and is_unit(stripped):
            return [("words", stripped)]
        if stripped in FUNCTIONS:
            return [("sign", "\\" + stripped)]
        if stripped[0].isdigit() or (stripped[0] in "-(." and stripped[-1] != ")"):
            return _Parser(stripped, self.takes_units).tokens
        return [("words", stripped)]

    def _letters(self, run: str, before: list[tuple[str, str]]) -> list[tuple[str, str]]:
        if run.lower() in _JOINTS:
            return [("joint", run)]
        follows_value = _ends_value(before)
        is_counted = self.takes_units and follows_value and is_unit(run)
        if (run in FUNCTIONS or run == "pi") and not is_counted:
            return [("sign", "\\" + run)]
        if run.lower() in ("infinity", "inf", "oo") and run != "oO":
            return [("sign", r"\infty")]
        is_behind = bool(before) and before[-1][0] == "space"
        if self.takes_units and follows_value and is_unit(run) and (len(run) > 1 or is_behind):
            return [("words", run)]
        if len(run) > 3 or (
            self.takes_units and is_behind and run in _SMALL_WORDS and len(run) > 1
        ):
            return [("words", run)]
        if run == "to" and is_behind:
            return [("sign", ":")]
        return [("letter", letter) for letter in run]

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

    # ---- forms --------------------------------------------------------------------------------

    def whole(self) -> Form:
        if choice := self._choice():
            return choice
        return _form_of(self.tokens, self)

    def _choice(self) -> Form | None:
        text = self.text
        found = CHOICE.match(text) or CHOICE_POINT.match(text)
        if found is None:
            alone = LETTER.fullmatch(_bare(text))
            return ("choice", alone[1], None) if alone else None
        rest = text[found.end() :].strip(" .,;")
        if not rest:
            return ("choice", found[1], None)
        return ("choice", found[1], _Parser(rest, self.takes_units).whole())

    def part(self, tokens: list[tuple[str, str]]) -> Form:
        """Parses tokens that no comma or relation divides."""
        other = _Parser.__new__(_Parser)
        other.text, other.takes_units = "", self.takes_units
        other.tokens, other.at, other.depth, other.signs = tokens, 0, self.depth, 0
        return other._value()

    def _value(self) -> Form:
        start = self.at
        money = next((unit for sign, unit in _MONEY.items() if self._take(sign)), "")
        kind, token = self._peek()
        if kind == "words" and not money:
            return self._text()
        if kind == "number" and (based := self._based()):
            return based
        self.at = start + (1 if money else 0)
        term = self._sum()
        if money := money or next((unit for sign, unit in _MONEY.items() if self._take(sign)), ""):
            return self._measure(term, f"{money} ")
        kind, token = self._peek()
        if kind == "end":
            if self.signs:
                return ("list", (("term", _signed(term, 1)), ("term", _signed(term, -1))))
            return _degrees(term) or ("term", term)
        if token in (r"\pmod", r"\bmod", r"\mod") or (kind == "words" and token == "mod"):
            return self._modulo(term)
        if token == "(" and self._is_modulus():
            self.at += 1
            return self._modulo(term, closing=")")
        if token == "(" and self._is_aside():
            return self._measure(term, "")
        if kind in ("words", "letter") or token == "%":
            return self._measure(term, "")
        raise Unparsed(token)

    def _is_modulus(self) -> bool:
        following = [token for kind, token in self.tokens[self.at : self.at + 6] if kind != "space"]
        return "".join(following[1:4]).lstrip("\\").startswith("mod")

    def _is_aside(self) -> bool:
        """True for words in brackets: ``12 (twelve)``."""
        return self.tokens[self.at + 1 : self.at + 2][:1] != [] and (
            self.tokens[self.at + 1][0] == "words"
        )

    def _modulo(self, term: Term, closing: str = "") -> Form:
        self._next()
        while self._peek()[0] == "letter" and self._peek()[1] in "mod":
            self._next()
        modulus = self._sum()
        if closing:
            self._want(closing)
        if self._peek()[0] != "end":
            raise Unparsed("mod")
        return ("modulo", term, modulus)

    def _based(self) -> Form | None:
        """Reads ``101_2``, ``1A3_{16}`` and ``101_{\\text{two}}``."""
        digits = ""
        while self._peek()[0] in ("number", "letter") and "." not in self._peek()[1]:
            digits += self._next()[1]
        if not self._take("_"):
            if self._peek() != ("words", "base"):
                return None
            self._next()
        is_braced = self._take("{")
        is_bracketed = self._take("(")
        token = self._next()[1]
        if is_bracketed:
            self._want(")")
        if is_braced:
            self._want("}")
        names = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
                 "eight": "8", "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
        base = names.get(token.lower(), token)
        if not base.isdigit() or self._peek()[0] != "end":
            return None
        return ("based", digits.lstrip("0").upper() or "0", int(base))

    def _measure(self, term: Term, prefix: str) -> Form:
        words: list[str] = [prefix]
        while self._peek()[0] != "end":
            kind, token = self._next()
            is_base = bool(BASE.fullmatch(token.lower()))
            if kind == "words" and not is_base and NO_UNIT.search(token.lower()):
                raise Unparsed(token)
            if kind in ("words", "letter", "number"):
                words.append(f" {token} ")
            elif token in ("^", "/", "-", "%", "(", ")", "."):
                words.append(token)
            elif token == r"\circ":
                words.append(" degree ")
            elif token == r"\cdot":
                words.append(" ")
            elif token not in ("{", "}", r"\$", "'", ",", r"\degree"):
                raise Unparsed(token)
        text = "".join(words).strip()
        lowered = text.lower()
        if base := BASE.fullmatch(lowered):
            return ("based", _digits(term), int(base[1]))
        if lowered.startswith(("%", "percent", "per cent")):
            return ("percent", term)
        return ("measure", term, unit_of(text))

    def _text(self) -> Form:
        words = words_of(self.text)
        if not words:
            content = [
                token if kind in ("words", "number", "letter") else " "
                for kind, token in self.tokens
                if kind in ("words", "number", "letter", "space", "joint")
            ]
            if any(kind == "sign" and token not in ".-'" for kind, token in self.tokens):
                raise Unparsed("text")
            words = " ".join(" ".join(content).lower().split())
        return ("text", words)

    # ---- terms --------------------------------------------------------------------------------

    def _sum(self) -> Term:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
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
                self.at += 1
                below = self._factor()
                if (
                    term[0] == "times"
                    and len(term) == 3
                    and term[1][0] == term[2][0] == "number"
                    and below[0] == "number"
                ):
                    raise Unparsed("3 4/5")
                term = ("divide", term, below)
            elif self._begins_factor(kind, token):
                before = self.tokens[self.at - 1][0] == "space"
                if kind == "number" and term[0] == "number":
                    if not before:
                        raise Unparsed("two numbers")
                    term = self._mixed(term)
                    continue
                start = self.at
                more = self._power()
                if kind == "number" and self.tokens[start - 1][0] == "letter":
                    raise Unparsed("x2")
                if _is_mixed(term, more, token):
                    sign = -1 if term[1] < 0 else 1
                    value = term[1] + sign * Fraction(more[1][1], more[2][1])
                    term = ("number", value, False)
                else:
                    term = _times(term, more)
            else:
                return term

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

    def _decimal(self, token: str) -> Term:
        if self._peek()[1] in (r"\overline", r"\bar") and "." in token + self._dot():
            self._take(".")
            self.at += 1
            cycle = self._raw_group()
            if cycle.isdigit() and 0 < len(cycle) < 30:
                digits = token.partition(".")[2]
                value = Fraction(token if "." in token else token + ".0")
                tail = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(digits))
                return ("number", value + tail, False)
            raise Unparsed("cycle")
        if self._peek() == ("sign", ".") and self.tokens[self.at + 1 : self.at + 2] in (
            [("sign", r"\overline")],
            [("sign", r"\bar")],
        ):
            self.at += 2
            cycle = self._raw_group()
            if cycle.isdigit() and len(cycle) < 30:
                return ("number", int(token) + Fraction(int(cycle), 10 ** len(cycle) - 1), False)
        return _leaf("number", token)

    def _dot(self) -> str:
        return ""

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


# ---- what commas, relations and brackets divide --------------------------------------------------


def _form_of(tokens: list[tuple[str, str]], parser: _Parser, depth: int = 0) -> Form:
    if depth > _MAX_DEPTH:
        raise Unparsed("too deep")
    tokens = _stripped(tokens)
    if not tokens:
        raise Unparsed("nothing")
    if _is_only_words(tokens):
        return parser.part(tokens) if len(tokens) == 1 else ("text", _words(tokens))
    parts = _split(tokens, lambda kind, token: kind == "joint" or token in (",", ";", r"\lor"))
    if len(parts) > 1:
        forms = tuple(_form_of(part, parser, depth + 1) for part in parts if _stripped(part))
        if len(forms) == 1:
            return forms[0]
        flat: list[Form] = []
        for form in forms:
            flat += form[1] if form[0] == "list" else [form]
        return _joined(tuple(flat), [token.lower() for kind, token in tokens if kind == "joint"])
    if relation := _relation(tokens, parser, depth):
        return relation
    for sign in (r"\setminus", r"\cup", r"\cap"):
        parts = _split(tokens, lambda kind, token, sign=sign: token == sign)  # type: ignore[misc]
        if len(parts) > 1:
            return (sign[1:], tuple(_form_of(part, parser, depth + 1) for part in parts))
    if (ratio := _split(tokens, lambda kind, token: token == ":")) and len(ratio) > 1:
        return ("ratio", tuple(parser.part(part) for part in ratio))
    return _bracketed(tokens, parser, depth) or parser.part(tokens)


def _joined(forms: tuple[Form, ...], joints: list[str]) -> Form:
    if all(form[0] == "inequality" for form in forms):
        return ("both" if joints == ["and"] and len(forms) == 2 else "either", forms)
    return ("list", forms)


def _relation(tokens: list[tuple[str, str]], parser: _Parser, depth: int) -> Form | None:
    signs: list[str] = []

    def is_sign(kind: str, token: str) -> bool:
        if kind == "sign" and token in _RELATIONS:
            signs.append(_RELATIONS[token])
            return True
        return False

    parts = _split(tokens, is_sign)
    if not signs:
        return None
    if any(not _stripped(part) for part in parts[1:]):
        raise Unparsed("relation")
    if signs == ["in"]:
        return ("in", _joined_text(parts[0]), _form_of(parts[1], parser, depth + 1))
    sides = tuple(_side(part, parser, depth) for part in parts)
    if signs == ["=="]:
        return ("equation", sides, "==") if sides[1][0] == "modulo" else ("equation", sides)
    if set(signs) <= {"=", "~"}:
        return ("equation", sides)
    if "in" in signs or "==" in signs or "to" in signs or "~" in signs:
        raise Unparsed("relations")
    return ("inequality", tuple(signs), sides)


def _side(tokens: list[tuple[str, str]], parser: _Parser, depth: int) -> Form:
    """Parses one side of an equation; a left side that is no value is a name."""
    try:
        return _form_of(tokens, parser, depth + 1)
    except Unparsed:
        return ("label", _joined_text(tokens))


def _bracketed(tokens: list[tuple[str, str]], parser: _Parser, depth: int) -> Form | None:
    first, last = tokens[0][1], tokens[-1][1]
    if tokens[:1] == [("sign", r"\begin")]:
        return _matrix(tokens, parser, depth)
    if tokens == [("sign", r"\emptyset")] or tokens == [("sign", r"\varnothing")]:
        return ("set", ())
    if first == r"\mathbb":
        return ("text", "all " + _joined_text(tokens))
    if first not in _OPEN or last not in _CLOSE or not _is_one_group(tokens):
        return None
    inner = tokens[1:-1]
    if first == r"\{" and last == r"\}":
        if not _stripped(inner):
            return ("set", ())
        builder = _split(inner, lambda kind, token: token in ("|", r"\mid", ":"))
        if len(builder) == 2:
            return _form_of(builder[1], parser, depth + 1)
        return ("set", tuple(_form_of(part, parser, depth + 1) for part in _commas(inner)))
    if first == "{" and last == "}":
        return _form_of(inner, parser, depth + 1)
    if first in ("(", "[", r"\langle") and last in (")", "]", r"\rangle"):
        parts = _commas(inner)
        if len(parts) > 1:
            brackets = ("(" if first == r"\langle" else first) + (
                ")" if last == r"\rangle" else last
            )
            return ("tuple", brackets, tuple(_form_of(part, parser, depth + 1) for part in parts))
        if len(_split(inner, lambda kind, token: kind == "sign" and token in _RELATIONS)) > 1:
            return _form_of(inner, parser, depth + 1)
    return None


def _matrix(tokens: list[tuple[str, str]], parser: _Parser, depth: int) -> Form:
    """Reads an environment of rows; ``\\begin{pmatrix}`` and its kin are one."""
    at = next((i for i, (_, token) in enumerate(tokens) if token == "}"), 0)
    end = next((i for i, (_, token) in enumerate(tokens) if token == r"\end"), 0)
    name = "".join(token for _, token in tokens[2:at])
    if not name.endswith("matrix") and name != "array":
        raise Unparsed(name)
    if _stripped(tokens[end:])[-1] != ("sign", "}") or any(
        token == r"\begin" for _, token in tokens[at:]
    ):
        raise Unparsed(name)
    body = tokens[at + 1 : end]
    if name == "array":
        body = body[[token for _, token in body].index("}") + 1 :]
    rows = [row for row in _split(body, lambda kind, token: token == "\\\\") if _stripped(row)]
    return (
        "determinant" if name == "vmatrix" else "matrix",
        tuple(
            tuple(
                _form_of(cell, parser, depth + 1)
                for cell in _split(row, lambda kind, token: token == "&")
            )
            for row in rows
        ),
    )


def _commas(tokens: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    return _split(tokens, lambda kind, token: token in (",", ";"))


def _split(
    tokens: list[tuple[str, str]], divides: Callable[[str, str], bool]
) -> list[list[tuple[str, str]]]:
    """Divides tokens where ``divides`` is true outside all brackets."""
    parts: list[list[tuple[str, str]]] = [[]]
    depth = 0
    for kind, token in tokens:
        if kind == "sign":
            if token in _OPEN or token == r"\begin":
                depth += 1
            elif token in _CLOSE or token == r"\end":
                depth -= 1
        if depth == 0 and token not in _CLOSE and divides(kind, token):
            parts.append([])
        else:
            parts[-1].append((kind, token))
    return parts


def _is_one_group(tokens: list[tuple[str, str]]) -> bool:
    """True if the first bracket closes with the last token."""
    depth = 0
    for i, (kind, token) in enumerate(tokens):
        if kind == "sign":
            depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0:
            return i == len(tokens) - 1
    return False


def _stripped(tokens: list[tuple[str, str]]) -> list[tuple[str, str]]:
    start, end = 0, len(tokens)
    while start < end and tokens[start][0] == "space":
        start += 1
    while end > start and (tokens[end - 1][0] == "space" or tokens[end - 1] == ("sign", ".")):
        end -= 1
    return tokens[start:end]


def _is_only_words(tokens: list[tuple[str, str]]) -> bool:
    return tokens[0][0] == "words" and all(
        kind in ("words", "space", "letter") for kind, _ in tokens
    )


def _words(tokens: list[tuple[str, str]]) -> str:
    return words_of("".join(token if kind != "space" else " " for kind, token in tokens))


def _joined_text(tokens: list[tuple[str, str]]) -> str:
    return "".join(token for kind, token in tokens if kind != "space")


def _ends_value(tokens: list[tuple[str, str]]) -> bool:
    """True if a unit may follow."""
    ends = (")", "}", r"\pi", r"\circ", "/", r"\cdot")
    return any(kind in ("number", "words") or token in ends for kind, token in tokens[-3:])


def _bare(text: str) -> str:
    return "".join(found["content"] or found[0] for found in TOKENS.finditer(text)).strip()


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


def _signed(term: Term, sign: int) -> Term:
    """Returns ``term`` with each plus-minus replaced by one of its signs."""
    if term[0] == "plusminus":
        inner = _signed(term[2], sign)
        return inner if term[1] * sign > 0 else ("neg", inner)
    return tuple(_signed(part, sign) if isinstance(part, tuple) else part for part in term)


def _degrees(term: Term) -> Form | None:
    if term[0] == "degree":
        return ("measure", term[1], unit_of("degrees"))
    if term[0] == "neg" and term[1][0] == "degree":
        return ("measure", ("neg", term[1][1]), unit_of("degrees"))
    return None


def _digits(term: Term) -> str:
    if term[0] != "number" or term[1].denominator != 1:
        raise Unparsed("base")
    return str(term[1])


def _with_thousands_outside(text: str) -> str:
    """Removes the commas of ``1,234`` outside round, square and set brackets, where they divide."""
    depth, out, at = 0, [], 0
    for found in THOUSANDS.finditer(text):
        between = text[at : found.start()]
        depth += sum(between.count(sign) for sign in "([") - sum(between.count(s) for s in ")]")
        depth += between.count(r"\{") - between.count(r"\}")
        out += [between, found[0] if depth > 0 else found[0].replace(",", "")]
        at = found.end()
    return "".join(out) + text[at:]
