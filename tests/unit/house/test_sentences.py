"""Sentences of the product stand in golden files, not in asserts: how many are left, which may only fall.

An assert that holds a sentence has a text of four words side by side in its condition; a ``match=`` holds
one with two words, or if it is a variable. Words that are numbers or names of fields break a sentence.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
MOST = 150
SENTENCE = re.compile(r"[A-Za-z'’-]+[,;:.]?(?: [A-Za-z'’-]+[,;:.]?){3}")
_ASSERT = re.compile(r"^( *)assert .*\n(?:\1[ )\]}].*\n|\n)*", re.MULTILINE)

_MATCH = re.compile(r"\bmatch=((?:[rf]*\"(?:[^\"\\]|\\.)*\")|\w+)")
_TWO = re.compile(r"[A-Za-z'’-]{2,}[,;:.]? [A-Za-z'’-]{2,}")


def sentences(source: str) -> list[str]:
    """The sentences in conditions of asserts, one of each, and those of ``match=``."""
    found = [text for text in _MATCH.findall(source) if text[0] not in 'rf"' or _TWO.search(text)]
    for segment in _ASSERT.finditer(source):
        if SENTENCE.search(segment[0].partition("assert ")[2]):
            found += _texts(textwrap.dedent(segment[0]))
    return found


def _texts(segment: str) -> list[str]:
    (statement,) = ast.parse(segment).body[:1]
    assert isinstance(statement, ast.Assert)
    constants = (n.value for n in ast.walk(statement.test) if isinstance(n, ast.Constant))
    return [text for text in constants if isinstance(text, str) and SENTENCE.search(text)][:1]


def test_a_sentence_is_four_words_in_a_condition_or_any_match() -> None:
    source = """
def test_it():
    assert "no room for the model" in text
    assert x == 1, "because it is so often"
    assert y == (
        "one two three 4 five",
        "it can not be used",
    )
    with pytest.raises(ConfigError, match="is not"), pytest.raises(KeyError, match="name"):
        call("a text that is given")
"""
    assert sentences(source) == ['"is not"', "no room for the model", "it can not be used"]


def test_few_asserts_hold_a_sentence() -> None:
    counts = Counter[str]()
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__) and (found := sentences(path.read_text(encoding="utf-8"))):
            counts[str(path.relative_to(TESTS))] = len(found)
    assert counts.total() <= MOST, (
        f"{counts.total()} sentences in asserts, of which there may be {MOST}; most in "
        f"{counts.most_common(5)}: compare with golden texts (tests/support/golden.py)"
    )
