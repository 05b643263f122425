"""Finds the one answer that a text states, for scorers that compare it whole (pure).

One reading of a text, never the best of several: else a policy would learn to give many answers. In time
linear in the text.
"""

from __future__ import annotations

import re
from collections import deque

from realsys.api.basics.thoughts import text_behind_thoughts

_OPENING, _CLOSING = "<answer>", "</answer>"
_BOXED = "\\boxed{"
_HASHES = "####"
_FENCE = "```"
# At the beginning of a line or sentence: "So the final answer is: 5." or "**Answer:** 5".
_SENTENCE = re.compile(
    r"(?:^[ \t*_#>]{0,8}|[.!?] )(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:final |correct )?answer"
    r"(?: is)?(?:[ \t*_]{0,4}:[*_]{0,4}|(?P<sentence>(?<=is)))[ \t\n]",
    re.IGNORECASE | re.MULTILINE,
)


def stated_answer(text: str) -> str:
    """Returns what stands behind the last mark of an answer, without its markup; else the whole text.

    Marks, the first that there is: ``<answer>…</answer>``, ``\\boxed{…}``, ``####``, a line or sentence
    that begins with "The answer is" or "Answer:". Of a text that is a fenced block, or bold, what is
    inside. Thoughts are no part of it; of those without an end nothing is an answer.
    """
    text = text_behind_thoughts(text) or ""
    if (marked := _tagged(text)) is not None:
        return _bare(marked)
    if _BOXED in text:
        return _bare(_up_to_closing_brace(text.rpartition(_BOXED)[2]))
    if _HASHES in text:
        return _bare(text.rpartition(_HASHES)[2])
    if last := deque(_SENTENCE.finditer(text), maxlen=1):
        (found,) = last
        rest = text[found.end() :].strip()
        return _bare(rest.removesuffix(".") if found["sentence"] is not None else rest)
    return _bare(text)


def _tagged(text: str) -> str | None:
    found, at = None, 0
    while (begin := text.find(_OPENING, at)) >= 0:
        begin += len(_OPENING)
        end = text.find(_CLOSING, begin)
        if end < 0:  # looked for once, not behind each of thousands that open
            break
        found, at = text[begin:end], end + len(_CLOSING)
    return found


def _bare(text: str) -> str:
    text = text.strip()
    if text.startswith(_FENCE) and text.endswith(_FENCE) and text.count(_FENCE) == 2:
        first, newline, rest = text[len(_FENCE) : -len(_FENCE)].partition("\n")
        text = (rest if newline else first).strip()
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2].strip()  # powers may be inside
    return text


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text
