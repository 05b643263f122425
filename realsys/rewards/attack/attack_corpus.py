"""Reads the corpus that ``realsys data score RULE --attack`` plays: exploits and honest paraphrases.

Two sides wrote it: ``exploits.jsonl`` and ``honest*.jsonl`` are ours, ``*_outside.jsonl`` are by
somebody who had not read the code. An exploit has a public ``source`` and a ``kind``. Places in texts:
``{MARK}``, a path that only code of an answer would write; ``{ANSWER}``, ``{WRONG}`` and ``{QUESTION}``
of a question.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MARK, ANSWER, WRONG, QUESTION = "{MARK}", "{ANSWER}", "{WRONG}", "{QUESTION}"
Side = Literal["own", "outside"]
_HERE = Path(__file__).parent
_EXPLOITS: dict[Side, str] = {"own": "exploits.jsonl", "outside": "exploits_outside.jsonl"}
_HONEST: tuple[tuple[Side, str], ...] = (
    ("own", "honest.jsonl"),
    ("own", "honest_math.jsonl"),
    ("outside", "honest_outside.jsonl"),
)


@dataclass(frozen=True, kw_only=True)
class Exploit:
    """A text that is no right answer and that some rule pays, runs, or never gets done with.

    Attributes:
        task: what it answers: ``math``, ``code``, ``judge``, ``reasoning_gym``, or ``any``.
        what: what it tries. source: who told of it.
        question, answer: of the text alone; empty: it fits any question of its task.
        wrong: an honest wrong answer to the question; empty: one is made.
    """

    kind: str
    task: str
    response: str
    source: str
    what: str = ""
    question: str = ""
    answer: str = ""
    wrong: str = ""
    side: Side = "own"


@dataclass(frozen=True, kw_only=True)
class Paraphrase:
    """A right answer in some form; of the task ``judge``, a judge's reply and the grade that it means."""

    task: str
    question: str
    answer: str
    response: str
    what: str = ""
    side: Side = "own"


@functools.cache
def exploits() -> tuple[Exploit, ...]:
    """Returns all exploits, ours first."""
    return tuple(
        Exploit(**row, side=side) for side, file in _EXPLOITS.items() for row in _rows(_HERE / file)
    )


@functools.cache
def paraphrases() -> tuple[Paraphrase, ...]:
    """Returns all honest paraphrases, ours first."""
    return tuple(
        Paraphrase(**row, side=side) for side, file in _HONEST for row in _rows(_HERE / file)
    )


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def filled(text: str, *, answer: str, wrong: str, question: str, mark: str) -> str:
    """Returns ``text`` with its places filled in."""
    for place, value in ((ANSWER, answer), (WRONG, wrong), (QUESTION, question), (MARK, mark)):
        text = text.replace(place, value)
    return text
