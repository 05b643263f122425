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

Terms are those of term_parser.py. The text must be short: nothing here reads more than ``MAX_CHARACTERS``.
"""

from __future__ import annotations

import re
from typing import Any

from realsys.rewards.final_answers.answer_spelling import spelt
from realsys.rewards.final_answers.answer_tokens import (
    CLOSING,
    OPENING,
    Token,
    bare_text,
    divided,
    divided_by_commas,
    is_one_group,
    is_only_words,
    joined_text,
    stripped_of_spaces,
    tokens_of,
    words_of,
)
from realsys.rewards.final_answers.measures import NO_UNIT, unit_of
from realsys.rewards.final_answers.term_parser import (
    MAX_DEPTH,
    Term,
    TermParser,
    Unparsed,
    with_sign_of,
)

Form = tuple[Any, ...]
MAX_CHARACTERS = 500
CHOICE = re.compile(r"\\?(?:text|textbf|mathrm|mathbf)?\s*\{?\s*\(\s*([A-J])\s*\)\s*\}?[\s:.]*")
CHOICE_POINT = re.compile(r"([A-J])\s*[).:]\s+(?=\S)")
BASE = re.compile(r"\(?\s?(?:in )?base\s{1,3}(\d{1,2})\s?\)?")
LETTER = re.compile(r"(?:[Oo]ption |[Cc]hoice )?\(?\s*([A-J])\s*\)?[.:]?")
_RELATIONS = {"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\lt": "<",
              r"\gt": ">", r"\in": "in", r"\equiv": "==", r"\approx": "~", r"\to": "to"}  # fmt: skip
_MONEY = {r"\$": "dollar", "€": "euro", "£": "sterling", "₹": "rupee", "¥": "yen"}


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
            form = _whole(text, takes_units)
        except (Unparsed, RecursionError, ValueError, OverflowError, ZeroDivisionError):
            continue
        if form not in forms:
            forms.append(form)
    if (words := words_of(text)) and ("text", words) not in forms:
        forms.append(("text", words))
    return forms


def _whole(text: str, takes_units: bool) -> Form:
    found = CHOICE.match(text) or CHOICE_POINT.match(text)
    if found is None:
        if alone := LETTER.fullmatch(bare_text(text)):
            return ("choice", alone[1], None)
        return _form_of(tokens_of(text, takes_units=takes_units))
    rest = text[found.end() :].strip(" .,;")
    return ("choice", found[1], _whole(rest, takes_units) if rest else None)


def _form_of(tokens: list[Token], depth: int = 0) -> Form:
    if depth > MAX_DEPTH:
        raise Unparsed("too deep")
    tokens = stripped_of_spaces(tokens)
    if not tokens:
        raise Unparsed("nothing")
    if is_only_words(tokens):
        return _amount(tokens) if len(tokens) == 1 else ("text", _words(tokens))
    parts = divided(tokens, lambda kind, token: kind == "joint" or token in (",", ";", r"\lor"))
    if len(parts) > 1:
        forms = tuple(_form_of(part, depth + 1) for part in parts if stripped_of_spaces(part))
        if len(forms) == 1:
            return forms[0]
        flat: list[Form] = []
        for form in forms:
            flat += form[1] if form[0] == "list" else [form]
        return _joined(tuple(flat), [token.lower() for kind, token in tokens if kind == "joint"])
    if relation := _relation(tokens, depth):
        return relation
    for sign in (r"\setminus", r"\cup", r"\cap"):
        parts = divided(tokens, lambda kind, token, sign=sign: token == sign)  # type: ignore[misc]
        if len(parts) > 1:
            return (sign[1:], tuple(_form_of(part, depth + 1) for part in parts))
    if (ratio := divided(tokens, lambda kind, token: token == ":")) and len(ratio) > 1:
        return ("ratio", tuple(_amount(part) for part in ratio))
    return _bracketed(tokens, depth) or _amount(tokens)


def _amount(tokens: list[Token]) -> Form:
    return _AmountParser(tokens).value()


def _joined(forms: tuple[Form, ...], joints: list[str]) -> Form:
    if all(form[0] == "inequality" for form in forms):
        return ("both" if joints == ["and"] and len(forms) == 2 else "either", forms)
    return ("list", forms)


def _relation(tokens: list[Token], depth: int) -> Form | None:
    signs: list[str] = []

    def is_sign(kind: str, token: str) -> bool:
        if kind == "sign" and token in _RELATIONS:
            signs.append(_RELATIONS[token])
            return True
        return False

    parts = divided(tokens, is_sign)
    if not signs:
        return None
    if "~" in signs:  # what is about equal to the value is no answer
        end = signs.index("~") + 1
        parts, signs = (
            (parts[:end], signs[: end - 1]) if stripped_of_spaces(parts[0]) else (parts[1:2], [])
        )
        if not signs:
            return _form_of(parts[0], depth + 1)
    if any(not stripped_of_spaces(part) for part in parts[1:]):
        raise Unparsed("relation")
    if signs == ["in"]:
        return ("in", joined_text(parts[0]), _form_of(parts[1], depth + 1))
    sides = tuple(_side(part, depth) for part in parts)
    if signs == ["=="]:
        return ("equation", sides, "==") if sides[1][0] == "modulo" else ("equation", sides)
    if set(signs) == {"="}:
        return ("equation", sides)
    if "in" in signs or "==" in signs or "to" in signs:
        raise Unparsed("relations")
    return ("inequality", tuple(signs), sides)


def _side(tokens: list[Token], depth: int) -> Form:
    """Parses one side of an equation; a left side that is no value is a name."""
    try:
        return _form_of(tokens, depth + 1)
    except Unparsed:
        return ("label", joined_text(tokens))


def _bracketed(tokens: list[Token], depth: int) -> Form | None:
    first, last = tokens[0][1], tokens[-1][1]
    if tokens[:1] == [("sign", r"\begin")]:
        return _matrix(tokens, depth)
    if tokens == [("sign", r"\emptyset")] or tokens == [("sign", r"\varnothing")]:
        return ("set", ())
    if first == r"\mathbb":
        return ("text", "all " + joined_text(tokens))
    if first not in OPENING or last not in CLOSING or not is_one_group(tokens):
        return None
    inner = tokens[1:-1]
    if first == r"\{" and last == r"\}":
        if not stripped_of_spaces(inner):
            return ("set", ())
        builder = divided(inner, lambda kind, token: token in ("|", r"\mid", ":"))
        if len(builder) == 2:
            return _form_of(builder[1], depth + 1)
        return ("set", tuple(_form_of(part, depth + 1) for part in divided_by_commas(inner)))
    if first == "{" and last == "}":
        return _form_of(inner, depth + 1)
    if first in ("(", "[", r"\langle") and last in (")", "]", r"\rangle"):
        parts = divided_by_commas(inner)
        if len(parts) > 1:
            brackets = ("(" if first == r"\langle" else first) + (
                ")" if last == r"\rangle" else last
            )
            return ("tuple", brackets, tuple(_form_of(part, depth + 1) for part in parts))
        if len(divided(inner, lambda kind, token: kind == "sign" and token in _RELATIONS)) > 1:
            return _form_of(inner, depth + 1)
    return None


def _matrix(tokens: list[Token], depth: int) -> Form:
    """Reads an environment of rows; ``\\begin{pmatrix}`` and its kin are one."""
    at = next((i for i, (_, token) in enumerate(tokens) if token == "}"), 0)
    end = next((i for i, (_, token) in enumerate(tokens) if token == r"\end"), 0)
    name = "".join(token for _, token in tokens[2:at])
    if not name.endswith("matrix") and name != "array":
        raise Unparsed(name)
    if stripped_of_spaces(tokens[end:])[-1] != ("sign", "}") or any(
        token == r"\begin" for _, token in tokens[at:]
    ):
        raise Unparsed(name)
    body = tokens[at + 1 : end]
    if name == "array":
        body = body[[token for _, token in body].index("}") + 1 :]
    rows = [
        row for row in divided(body, lambda kind, token: token == "\\\\") if stripped_of_spaces(row)
    ]
    return (
        "determinant" if name == "vmatrix" else "matrix",
        tuple(
            tuple(
                _form_of(cell, depth + 1) for cell in divided(row, lambda kind, token: token == "&")
            )
            for row in rows
        ),
    )


def _words(tokens: list[Token]) -> str:
    return words_of("".join(token if kind != "space" else " " for kind, token in tokens))


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


class _AmountParser(TermParser):
    """Reads what no comma or relation divides: a number, its unit, base or modulus; or words."""

    def value(self) -> Form:
        """Reads the tokens as a number with what stands behind it, or as a term."""
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
                return ("list", (("term", with_sign_of(term, 1)), ("term", with_sign_of(term, -1))))
            return _degrees(term) or ("term", term)
        if token in (r"\pmod", r"\bmod", r"\mod") or (kind == "words" and token == "mod"):
            return self._modulo(term)
        if token == "(" and self._is_modulus():
            self.at += 1
            return self._modulo(term, closing=")")
        if token == "(" and self._is_aside():
            return self._measure(term, "")
        if kind in ("words", "letter") or token in ("%", "/"):
            return self._measure(term, "")
        raise Unparsed(token)

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
            if kind == "number" and words[-1] not in ("^", "-"):
                raise Unparsed("two numbers")
            if kind == "number" and words[-1] == "-":  # m^{-2}
                words.append(f"{token} ")
            elif kind in ("words", "letter", "number"):
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
        if lowered in ("%", "percent", "per cent"):
            return ("percent", term)
        if "%" in lowered or "percent" in lowered:
            raise Unparsed("a part of something")
        return ("measure", term, unit_of(text))

    def _text(self) -> Form:
        if any(kind == "sign" and token not in ".-'" for kind, token in self.tokens):
            raise Unparsed("text")
        words = [token.lower() for kind, token in self.tokens if kind != "sign"]
        return ("text", " ".join(" ".join(words).split()))
