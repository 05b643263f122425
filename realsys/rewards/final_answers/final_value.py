"""Finds the part of a text that states its final value (pure).

Marks are looked for in this order; the last one of its kind counts:

1. ``#### value``: exactly four signs that begin a line, and a value on that line. ``#### Step 2`` is a
   heading. A ``\\boxed{…}`` or ``<answer>…</answer>`` behind it wins.
2. ``\\boxed{…}`` or ``\\fbox{…}``. Boxes that only commas or words like "or" divide are one answer, a list.
   ``<answer>…</answer>`` behind it wins.
3. ``####`` within a line.
4. Prose: what follows "the answer is", or "Answer:"; else the end of the text.

Each pattern takes time in proportion to the text, and each is applied once to a part of it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from realsys.data.sources.record_shape import FINAL
from realsys.rewards.final_answers.plain_numbers import NUMBERS, has_prices, is_unstated, last_match

MAX_CHARACTERS = 500  # of a value
_PROSE_CHARACTERS = 2000  # of a text's end, that prose is read from
_MAX_BOXES = 12
_MAX_LINES = 1000  # with ####

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
BARE_BOX = re.compile(r"\s?(-?\d[\d.,]*|[A-Za-z]|\\[a-z]+)")
JOINT = re.compile(
    r"[\s$.,;]{0,6}(?:\\text\s?\{)?\s?(?:or|and|,|;|\\lor|\\quad|\\qquad)?\s?\}?[\s$,]{0,6}(?:[a-z](?:_\d)?\s?=\s?)?"
)
LABEL = re.compile(
    r"[*_`\s]{0,4}(?:the\s)?(?:final\s|correct\s)?(?:answer|result|total|solution|value)"
    r"(?:\sis)?[*_`\s]{0,4}[:=]?[*_`\s]{0,4}",
    re.IGNORECASE,
)
DIGITS = re.compile(r"-?\d[\d,.]*")
NUMBERED = re.compile(r"\d{1,3}[.):]\s+[A-Za-z*]")
BEGINS_VALUE = re.compile(
    r"(?:[-+−–±]\s?)?(?:[$€£]\s?)?(?:\\\$|\\\(|\\\[|\$\$?)?\s?"
    r"(?:[-+−–±]\s?)?(?:\d|\.\d|[½⅓⅔¼¾√π∞]|\(|\[|\||\\[a-zA-Z{])"
)
SHORT_VALUE = re.compile(r"[A-Za-zπθ](?![A-Za-z])")
LONG_WORD = re.compile(r"[A-Za-z]{4}")
SECTION = re.compile(
    r"(?:step|case|part|problem|question|example|section|method|solution|check|approach|option"
    r"|exercise|chapter|phase|stage|attempt|try|note|verification|lemma)\b",
    re.IGNORECASE,
)
ANCHOR = re.compile(
    r"\b(?:answer|result)s?\b[^.\n:=$\d]{0,40}?(?:\b(?:is|are|be|equals)\b|:|=)", re.IGNORECASE
)
FILLER = re.compile(
    r"[\s*_`:]{0,6}(?:(?:therefore|thus|hence|simply|just|exactly|then|now|either|between|equal to"
    r"|option|choice|given by|the|a|an|that)\b[\s*_`:,]{0,4}){0,3}",
    re.IGNORECASE,
)
REVISION = re.compile(
    r"\b(?:wait|actually|no,|correction|sorry|oops|mistake|instead|rather|hmm|wrong|recheck|incorrect"
    r"|let me re)",
    re.IGNORECASE,
)
CLAUSE_END = re.compile(
    r"\.(?=\s|$)|\n|!(?=\s|$)|;|,\s(?!(?:and\s|or\s)?[-−$\\(\d{x-z]|or\b|and\b)"
    r"|\s(?:because|since|as|which|where|so|after|when|with|for|if|by|from|per the)\s"
    r"|\sand\s(?:she|he|they|it|we|the|there|this|that)\s|\s\(",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
MATH = re.compile(r"\$\$?[^$]{1,500}\$\$?|\\\([^$]{1,500}?\\\)|\\\[[^$]{1,500}?\\\]")
BETWEEN_MATH = re.compile(r"\s?(?:,|;|and|or|, and|, or)\s?")
CONCLUSION = re.compile(r"^(?:so|thus|hence|therefore),?\s", re.IGNORECASE)
YES_OR_NO = re.compile(r"(?:yes|no)\b(?=[,.!]|$)", re.IGNORECASE)
NAMED_CHOICE = re.compile(r"\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s\(?([A-J])\b")
AMOUNT = re.compile(rf"(?:\\?\$\s?)?(?:[-−]?\d*\s?[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]|{NUMBERS.pattern})")
IS = re.compile(r"\b(?:is|are|on|equals|be|was|were)\b(?:\s(?:a|an|the|on))?|:(?=\s)|=")


@dataclass(frozen=True)
class Stated:
    """A final value, and whether it had a mark: in prose the value stands among words.

    Attributes:
        text: the value.
        is_marked: True behind ``####``, in a box or in ``<answer>``.
        is_anchored: True for prose behind "the answer is".
    """

    text: str
    is_marked: bool
    is_anchored: bool = False


def final_value(text: str) -> str:
    """Returns the part of ``text`` that holds its final value."""
    return stated_value(text).text


def stated_value(text: str) -> Stated:
    """Finds the final value of ``text``."""
    at_sign, line = _signed_line(text)
    at_box, box = _last_box(text)
    at_tag, tag = _last_tag(text)
    if at_tag > max(at_sign, at_box) and tag:
        return _within(tag)
    if at_box > at_sign:
        return Stated(_short(box), is_marked=True)
    if at_sign >= 0:
        return Stated(_short(line), is_marked=True)
    if tag:
        return _within(tag)
    return _in_line(text) or _in_prose(text)


def _within(text: str) -> Stated:
    """Finds the value in what was marked: a box in ``<answer>`` is the answer."""
    at_box, box = _last_box(text)
    if at_box >= 0:
        return Stated(_short(box), is_marked=True)
    return Stated(
        _short(LABEL.sub("", text, count=1) if LABEL.match(text) else text), is_marked=True
    )


def _short(text: str) -> str:
    return text.strip()[-MAX_CHARACTERS:]


# ---- #### ----------------------------------------------------------------------------------------


def _signed_line(text: str) -> tuple[int, str]:
    """Returns where the last ``####`` with a value stands, and the value; -1 if there is none."""
    at = len(text)
    left = _MAX_LINES
    while left and (at := text.rfind(FINAL, 0, at)) >= 0:
        indent = text[max(0, at - 4) : at].rpartition("\n")[2]
        if indent.strip() or len(indent) > 3:
            continue
        left -= 1
        end = text.find("\n", at)
        line = text[at + len(FINAL) : len(text) if end < 0 else end]
        if not line.startswith("#") and (value := _value_of_line(line)):
            return at, value
    return -1, ""


def _value_of_line(line: str) -> str:
    """Returns the value that stands behind ``####``; "" for a heading."""
    line = line.strip()
    if DIGITS.fullmatch(line):
        return line
    if BOX.search(line):
        return _last_box(line)[1]
    rest = line.strip("*_` ")
    if (label := LABEL.match(rest)) and label[0].strip():
        rest = rest[label.end() :].strip("*_` ")
    elif ":" in rest and not BEGINS_VALUE.match(rest):
        if SECTION.match(rest):
            return ""
        rest = rest.rpartition(":")[2].strip("*_` ")
    if not rest:
        return ""
    if NUMBERED.match(rest):
        return ""
    if BEGINS_VALUE.match(rest):
        return rest
    return rest if SHORT_VALUE.match(rest) and not _is_sentence(rest) else ""


def _is_sentence(text: str) -> bool:
    """True for words such as ``A shorter way``, not for ``x^2 + 1`` or ``x = 5 apples``."""
    return "=" not in text and bool(LONG_WORD.search(text))


def _in_line(text: str) -> Stated | None:
    """Reads ``… so it is 4. #### 4`` within a line, and words on the text's last line."""
    if FINAL not in text[-_PROSE_CHARACTERS:]:
        return None
    before, sign, line = text[-_PROSE_CHARACTERS:].rstrip().rpartition(FINAL)
    line = line.strip()
    if not sign or "\n" in line or line.startswith("#") or before.endswith("#"):
        return None
    if value := _value_of_line(line):
        return Stated(_short(value), is_marked=True)
    rest = line.strip("*_` ")
    if rest and not SECTION.match(rest) and not any(character.isdigit() for character in rest):
        return Stated(_short(rest), is_marked=True)
    return None


# ---- boxes ---------------------------------------------------------------------------------------


def _last_box(text: str) -> tuple[int, str]:
    """Returns where the last box begins, and its content with that of the boxes that belong to it."""
    if "box" not in text:
        return -1, ""
    starts = _starts(text)
    if not starts:
        return -1, ""
    at = starts[-1]
    content, _ = _content(text, at)
    first = at
    boxes = [content]
    for before in reversed(starts[-_MAX_BOXES - 1 : -1]):
        inner, end = _content(text, before)
        if end > first or end < 0:  # around it, or never closed
            break
        between = text[end:first]
        if len(between) > 40 or not between.strip() or not JOINT.fullmatch(between):
            break
        if not any(joint in between for joint in (",", ";", "or", "and", "quad")):
            break
        boxes.append(inner)
        first = before
    return at, ", ".join(reversed(boxes))


def _starts(text: str) -> list[int]:
    """Returns where the last boxes begin."""
    starts: list[int] = []
    at = len(text)
    while len(starts) <= _MAX_BOXES and at > 0:
        at = max(
            text.rfind(r"\boxed", 0, at),
            text.rfind(r"\fbox", 0, at),
            text.rfind(r"\framebox", 0, at),
        )
        if at < 0:
            break
        if BOX.match(text, at):
            starts.append(at)
    return starts[::-1]


def _content(text: str, at: int) -> tuple[str, int]:
    """Returns the content of the box at ``at`` and where it ends; -1 for one that is never closed."""
    found = BOX.match(text, at)
    assert found is not None
    start = found.end()
    opening = start
    while opening < len(text) and text[opening] in " \n\t" and opening - start < 4:
        opening += 1
    if text[opening : opening + 1] != "{":
        bare = BARE_BOX.match(text, start)
        return (bare[1].rstrip(".,"), bare.end()) if bare else ("", start)
    depth = 0
    limit = min(len(text), opening + 4000)
    at = opening
    while at < limit:
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : at], at + 1
        at += 1
    return text[opening + 1 :].split("\n", 1)[0][:4000].rstrip(" $."), -1


# ---- <answer> ------------------------------------------------------------------------------------


def _last_tag(text: str) -> tuple[int, str]:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return -1, ""
    return start, text[start + len("<answer>") : end].strip()


# ---- prose ---------------------------------------------------------------------------------------


def _in_prose(text: str) -> Stated:
    tail = _without_headings(text[-_PROSE_CHARACTERS:].strip())
    if (clause := _answer_clause(tail)) is not None:
        return Stated(_short(_math_of(clause) or clause), is_marked=False, is_anchored=True)
    return Stated(tail[-MAX_CHARACTERS:], is_marked=False)


def _without_headings(text: str) -> str:
    """Drops headings that number a section: ``## Step 2``."""
    if "#" not in text:
        return text
    return "\n".join(
        line
        for line in text.split("\n")
        if not (line.lstrip().startswith("#") and SECTION.match(line.strip(" #*_")))
    ).strip()


def _answer_clause(tail: str) -> str | None:
    """Returns what is said behind the last "the answer is", if it is a value and isn't taken back."""
    lowered = tail.lower()
    if "answer" not in lowered and "result" not in lowered:
        return None
    last = last_match(ANCHOR, tail)
    if last is None:
        return None
    start = last.end()
    if filler := FILLER.match(tail, start):
        start = filler.end()
    rest = tail[start : start + MAX_CHARACTERS]
    if not (BEGINS_VALUE.match(rest) or SHORT_VALUE.match(rest) or _is_short_line(rest)):
        return None
    end = _clause_end(rest)
    clause = rest[:end].strip(" *_`")
    if not clause or REVISION.search(tail, start):
        return None
    return clause


def _is_short_line(rest: str) -> bool:
    """True for one or two words up to the line's or sentence's end: ``Monday.``"""
    line = SENTENCE_END.split(rest, maxsplit=1)[0]
    return 0 < len(line.split()) <= 3 and not any(character.isdigit() for character in line)


def _clause_end(rest: str) -> int:
    """Returns where a clause ends, outside of LaTeX."""
    at = 0
    while found := CLAUSE_END.search(rest, at):
        before = rest[: found.start()]
        if before.count("$") % 2 and rest.count("$") > before.count("$"):
            at = rest.index("$", found.start()) + 1
        elif _is_open(before) or (found[0].strip() == "(" and not before.strip()):
            at = found.end()
        else:
            return found.start()
    return len(rest)


def _is_open(text: str) -> bool:
    """True if a text ends within ``\\(…\\)`` or ``\\[…\\]``."""
    return text.rfind(r"\(") > text.rfind(r"\)") or text.rfind(r"\[") > text.rfind(r"\]")


def _math_of(clause: str) -> str:
    """Returns the LaTeX of a clause; several that only "or" divides are a list; "" if it has none."""
    clause, found = _formulas(clause)
    if not found:
        return ""
    pieces = [found[0][0]]
    for one, other in itertools.pairwise(found):
        if not BETWEEN_MATH.fullmatch(clause[one.end() : other.start()]):
            break
        pieces.append(other[0])
    if len(pieces) == 1 and clause[: found[0].start()].strip(" *_`"):
        return ""
    if len(pieces) == 1:
        return clause if _is_unit_behind(clause[found[0].end() :]) else pieces[0]
    return ", ".join(piece.strip("$ ") for piece in pieces)


def _formulas(text: str) -> tuple[str, list[re.Match[str]]]:
    """Returns a text without its dollar signs of amounts, and its LaTeX."""
    text = text.replace(r"\$", "")
    if "\\" not in text and ("$" not in text or has_prices(text)):
        return text, []
    return text, list(MATH.finditer(text))


def _is_unit_behind(text: str) -> bool:
    words = text.split()
    return 0 < len(words) <= 3


def last_formula(tail: str) -> str:
    """Returns the last LaTeX in prose, with those that only "or" divides from it; "" if there is none."""
    tail, found = _formulas(tail)
    if not found:
        return ""
    pieces = [found[-1][0]]
    for one, other in zip(found[-2::-1], found[:0:-1], strict=False):
        if not BETWEEN_MATH.fullmatch(tail[one.end() : other.start()]):
            break
        pieces.append(one[0])
    stripped = [piece.strip("$ ") for piece in reversed(pieces)]
    return ", ".join(stripped)


def last_clause(tail: str) -> str:
    """Returns what the last sentence says behind its last "is" or sign: ``It falls on a Monday.``"""
    sentences = [sentence for sentence in SENTENCE_END.split(tail) if sentence.strip()]
    if not sentences:
        return ""
    sentence = CONCLUSION.sub("", sentences[-1].strip(" *_`"), count=1)
    if found := YES_OR_NO.match(sentence):
        return found[0]
    ends = [found.end() for found in IS.finditer(sentence)]
    return sentence[ends[-1] :].strip(" *_`") if ends else sentence


def last_amount(tail: str) -> str:
    """Returns the last number in prose and what stands behind it up to the clause's end: ``12 hours``."""
    last = last_match(AMOUNT, tail)
    if last is None or is_unstated(tail, last):
        return ""
    rest = tail[last.start() : last.start() + MAX_CHARACTERS]
    end = CLAUSE_END.search(rest, last.end() - last.start())
    words = rest[: end.start()] if end else rest
    return words if len(words) - len(last[0]) < 40 else last[0]


def named_choice(tail: str) -> str:
    """Returns the letter of ``Option B is correct.``; "" if there are none or several."""
    letters = set(NAMED_CHOICE.findall(tail))
    return letters.pop() if len(letters) == 1 else ""
