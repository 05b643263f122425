"""Answers with tool calls of each family of the package renderers, as the package itself writes them.

A case is an answer and what is in it. Broken ones are made of a good one by a number and a name that stand
nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from package_families import OF_PACKAGE

from realsys.rollout.conversation.answer_forms import ANSWER_FORMS
from realsys.rollout.conversation.form_choice import form_of_family
from realsys.rollout.conversation.forms.family_calls import FAMILY_CALLS

NAME = "get_weather"
ARGUMENTS = {"city": "Zürich", "days": 271828, "nights": 314159, "where": {"a": [1, None, True]}}
PROPERTIES: Mapping[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "nights": {"type": "integer"},
    "where": {"type": "object"},
}
SCHEMAS = {NAME: {"type": "object", "properties": PROPERTIES}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": NAME, "description": "d", "parameters": SCHEMAS[NAME]},
    }
]
TEXT, THOUGHTS = "Let me see.", "because"


@dataclass(frozen=True, kw_only=True)
class CallCase:
    """An answer's text, without the token that ended it, and how often it calls the tool."""

    text: str
    calls: int = 0
    content: str | None = None  # None: whatever is read of it
    reasoning: str = ""


def thought_marks(family: str) -> tuple[str, str] | None:
    """Returns the marks of a family's thoughts; None: it has none."""
    if family in FAMILY_CALLS:
        return FAMILY_CALLS[family].thought_marks[0]
    return next(iter(ANSWER_FORMS[form_of_family(family)].thought_marks), None)


@cache
def package_of(family: str) -> Any:
    """Returns the package's own renderer over a tokenizer with the family's marks."""
    from renderers import config_from_name, create_renderer

    return create_renderer(OF_PACKAGE[family].tokenizer, config_from_name(family))


@cache
def cases(family: str) -> dict[str, CallCase]:
    """Returns the cases of a family by name."""
    one = _written(family, 1, "")
    two = f"{one}; {one}" if family == "llama-3" else _written(family, 2, "")
    behind = f"{TEXT}\n{one}" if family == "llama-3" else _written(family, 1, TEXT)
    made = {
        "one call": CallCase(text=one, calls=1, content=""),
        "parallel": CallCase(text=two, calls=2, content=""),
        "text before": CallCase(text=behind, calls=1, content=TEXT),
        "cut off": CallCase(text=one[: one.index(str(ARGUMENTS["nights"])) + 3]),
        "NaN": CallCase(text=one.replace(str(ARGUMENTS["days"]), "NaN")),
        "twice": CallCase(text=one.replace("nights", "days")),
    }
    if marks := thought_marks(family):
        opening, closing = marks
        goes_on = "<|message_model|>" if family == "inkling" else ""
        thoughts = f"{opening}\n{THOUGHTS}{closing}{goes_on}"
        within = one.rpartition("<|message_model|>")[2].removesuffix(closing)
        made["thoughts before"] = CallCase(
            text=thoughts + behind, calls=1, content=TEXT, reasoning=THOUGHTS
        )
        made["in thoughts"] = CallCase(
            text=f"{opening}\n{within}{closing}{goes_on}Done.", content="Done."
        )
    return made


def _written(family: str, calls: int, content: str) -> str:
    """Returns what the package writes of an answer behind its prompt, without its last token."""
    made, of = package_of(family), OF_PACKAGE[family]
    question = [{"role": "user", "content": "?"}]
    prompt = made.render_ids(question, tools=TOOLS, add_generation_prompt=True)
    arguments: Any = ARGUMENTS
    answer = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"functions.{NAME}:{number}",
                "type": "function",
                "function": {"name": NAME, "arguments": arguments},
            }
            for number in range(calls)
        ],
    }
    whole = made.render_ids([*question, answer], tools=TOOLS)
    same = 0
    while same < min(len(prompt), len(whole)) and prompt[same] == whole[same]:
        same += 1
    text = str(of.tokenizer.decode(whole[same:], skip_special_tokens=False))
    for mark in (*of.ends, "</think>", "<think>", "<think:opensource>", "</think:opensource>"):
        text = text.rstrip().removesuffix(mark)
    # What opens and closes empty thoughts stands before
    for mark in ("<think>", "</think>", "<think:opensource>", "</think:opensource>"):
        text = text.lstrip().removeprefix(mark)
    return text.strip()


def calls_of(found: list[tuple[str, str]]) -> int | None:
    """Returns how many calls were read; None: one of them is not the call that was written."""
    expected = (NAME, json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":")))
    return len(found) if all(call == expected for call in found) else None
