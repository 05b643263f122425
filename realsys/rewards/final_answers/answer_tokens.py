"""Tokens of a final answer, numbers, letters, words and signs, and where they divide (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable

from realsys.rewards.final_answers.measures import is_unit

Token = tuple[str, str]  # kind: number, letter, words, joint, space, sign; and text
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
WORDS = re.compile(r"[^\W\d_](?:[\w '\-.,&/]*[^\W_])?")
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp sqrt max min gcd lcm"
    " det arg Re Im".split()
)
_SMALL_WORDS = frozenset("of in a at on by for is per the".split())
OPENING, CLOSING = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}
UNIT_LETTERS = frozenset("mgshltLNJWVCF")
_JOINTS = {"and", "or"}


def tokens_of(text: str, *, takes_units: bool) -> list[Token]:
    """Returns the tokens of a text; letters behind a number may be a unit if ``takes_units``."""
    if "(" not in text and "[" not in text and "{" not in text:
        text = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    else:
        text = _with_thousands_outside(text)
    tokens: list[Token] = []
    for found in TOKENS.finditer(text):
        if found["words"]:
            tokens += _content(found["content"], takes_units, ends_value(tokens))
        elif found["number"]:
            tokens.append(("number", found["number"]))
        elif found["command"]:
            tokens.append(("sign", found["command"]))
        elif found["letters"]:
            tokens += _letters(found["letters"], takes_units, tokens)
        elif found["space"]:
            tokens.append(("space", " "))
        else:
            tokens.append(("sign", found["sign"]))
    return tokens


def _content(content: str, takes_units: bool, follows_value: bool) -> list[Token]:
    """Tokens of ``\\text{…}``: mathematics, or words."""
    stripped = content.strip(" ~")
    if stripped == "to":
        return [("sign", ":")]
    if stripped.lower().strip(" ,") in _JOINTS:
        return [("joint", stripped)]
    if not stripped:
        return [("space", " ")]
    if len(stripped) == 1 and stripped.isalpha():
        is_counted = takes_units and follows_value and stripped in UNIT_LETTERS
        return [("words" if is_counted else "letter", stripped)]
    if takes_units and follows_value and is_unit(stripped):
        return [("words", stripped)]
    if stripped in FUNCTIONS:
        return [("sign", "\\" + stripped)]
    if stripped[0].isdigit() or (stripped[0] in "-(." and stripped[-1] != ")"):
        return tokens_of(stripped, takes_units=takes_units)
    return [("words", stripped)]


def _letters(run: str, takes_units: bool, before: list[Token]) -> list[Token]:
    if run.lower() in _JOINTS:
        return [("joint", run)]
    follows_value = ends_value(before)
    is_counted = takes_units and follows_value and is_unit(run)
    if (run in FUNCTIONS or run == "pi") and not is_counted:
        return [("sign", "\\" + run)]
    if run.lower() in ("infinity", "inf", "oo") and run != "oO":
        return [("sign", r"\infty")]
    is_behind = bool(before) and before[-1][0] == "space"
    if takes_units and follows_value and is_unit(run) and (len(run) > 1 or is_behind):
        return [("words", run)]
    if len(run) > 3 or (takes_units and is_behind and run in _SMALL_WORDS and len(run) > 1):
        return [("words", run)]
    if run == "to" and is_behind:
        return [("sign", ":")]
    return [("letter", letter) for letter in run]


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


def divided_by_commas(tokens: list[Token]) -> list[list[Token]]:
    return divided(tokens, lambda kind, token: token in (",", ";"))


def divided(tokens: list[Token], divides: Callable[[str, str], bool]) -> list[list[Token]]:
    """Divides tokens where ``divides`` is true outside all brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for kind, token in tokens:
        if kind == "sign":
            if token in OPENING or token == r"\begin":
                depth += 1
            elif token in CLOSING or token == r"\end":
                depth -= 1
        if depth == 0 and token not in CLOSING and divides(kind, token):
            parts.append([])
        else:
            parts[-1].append((kind, token))
    return parts


def is_one_group(tokens: list[Token]) -> bool:
    """True if the first bracket closes with the last token."""
    depth = 0
    for i, (kind, token) in enumerate(tokens):
        if kind == "sign":
            depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return i == len(tokens) - 1
    return False


def stripped_of_spaces(tokens: list[Token]) -> list[Token]:
    start, end = 0, len(tokens)
    while start < end and tokens[start][0] == "space":
        start += 1
    while end > start and (tokens[end - 1][0] == "space" or tokens[end - 1] == ("sign", ".")):
        end -= 1
    return tokens[start:end]


def is_only_words(tokens: list[Token]) -> bool:
    return tokens[0][0] == "words" and all(
        kind in ("words", "space", "letter") for kind, _ in tokens
    )


def joined_text(tokens: list[Token]) -> str:
    return "".join(token for kind, token in tokens if kind != "space")


def ends_value(tokens: list[Token]) -> bool:
    """True if a unit may follow."""
    ends = (")", "}", r"\pi", r"\circ", "/", r"\cdot")
    return any(kind in ("number", "words") or token in ends for kind, token in tokens[-3:])


def bare_text(text: str) -> str:
    return "".join(found["content"] or found[0] for found in TOKENS.finditer(text)).strip()


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
