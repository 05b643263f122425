"""How families write calls that no form of ours reads, as far as a reader has to be guarded.

The package ``renderers`` reads them (package_form.py). Here stands what it does not look at: where a block
of calls ends, what else stands in it, and what it lets pass: NaN, and a parameter that stands twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from realsys.api.basics.thoughts import THINK
from realsys.rollout.conversation.forms.call_syntax import JSON_STRING
from realsys.rollout.conversation.forms.parsed_answer import ParsedCall
from realsys.rollout.conversation.forms.strict_json import call_of, read_json

# Statuses that are not about values; those are judged here, without a schema as with one.
READ = ("ok", "invalid_json", "unknown_tool")


class FoundCall(Protocol):
    """A call as the package found it."""

    raw: str
    name: str | None
    arguments: Any
    status: str


@dataclass(frozen=True, kw_only=True)
class FamilyCalls:
    """The calls of one family.

    Attributes:
        opening, closing: marks of a block of calls.
        argument: the pattern of an argument's own text, in which the marks mean nothing.
        atoms: marks that are single tokens to the package; all else is text to it.
        shape: what a block must be to reach the package, whose own patterns pass over what does not fit,
            and take time quadratic in it; None: the check is enough.
        check: returns the calls of a block's text and what the package found in it; ValueError: a fault.
        template: texts that stand in the family's chat template, and in no other's.
    """

    opening: str
    closing: str
    argument: str
    atoms: tuple[str, ...]
    check: Callable[[str, Sequence[FoundCall]], list[ParsedCall]]
    thought_marks: tuple[tuple[str, str], ...] = (THINK,)
    shape: re.Pattern[str] | None = None
    template: tuple[str, ...] = ()


def checked_calls(family: FamilyCalls, block: str, found: Sequence[FoundCall]) -> list[ParsedCall]:
    """Returns the calls of a block.

    Raises:
        ValueError: not all of them can be read.
    """
    for one in found:
        if str(one.status) not in READ:
            raise ValueError(f"the package says {str(one.status).replace('_', ' ')}")
    if not found:
        raise ValueError("there is no call between its marks")
    calls = family.check(block, found)
    for call in calls:
        read_json(call.arguments)  # NaN, by whatever way
    return calls


def has_shape(family: FamilyCalls, block: str) -> bool:
    """Tells whether a block may reach the package."""
    return family.shape is None or family.shape.fullmatch(block) is not None


def _until(mark: str) -> str:
    """Returns the pattern of a text up to ``mark`` and with it, in linear time."""
    return f"(?:(?!{re.escape(mark)}).)*+{re.escape(mark)}"


def _argument(opening: str, closing: str) -> str:
    """Returns the pattern of an argument's text between two marks, the second of which may be missing."""
    opening, closing = re.escape(opening), re.escape(closing)
    return f"{opening}(?:(?!{closing}).)*+(?:{closing})?+"


def _section(opening: str, call: str, closing: str) -> re.Pattern[str]:
    """Returns the pattern of a block of calls between two marks; ``call`` is the pattern of one."""
    calls = rf"(?:\s*+{call})++\s*+"
    return re.compile(f"{re.escape(opening)}{calls}{re.escape(closing)}", re.DOTALL)


def _texts_between(text: str, opening: str, closing: str) -> Iterator[str]:
    at = 0
    while (begin := text.find(opening, at)) >= 0 and (end := text.find(closing, begin)) >= 0:
        yield text[begin + len(opening) : end]
        at = end + len(closing)


# ---- arguments that are JSON ---------------------------------------------------------------------

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def _kimi_calls(block: str, found: Sequence[FoundCall]) -> list[ParsedCall]:
    return [call_of(call.name, read_json(call.raw.partition(_KIMI_ARGUMENTS)[2])) for call in found]


def _inkling_calls(block: str, found: Sequence[FoundCall]) -> list[ParsedCall]:
    calls = []
    for call in found:
        value = read_json(call.raw)
        if not isinstance(value, dict) or "args" not in value:
            raise ValueError("it has no 'args'")
        calls.append(call_of(call.name, value["args"]))
    return calls


# ---- arguments that are bare text ----------------------------------------------------------------


def _tagged_calls(
    opening: str, closing: str, *, in_tag: bool = False, is_typed: bool = False
) -> Callable[[str, Sequence[FoundCall]], list[ParsedCall]]:
    """Makes the check of a family whose values stand between tags.

    Args:
        in_tag: the opening goes on, up to ``>``.
        is_typed: the family says which values are JSON; else what is no JSON is a text.
    """

    def check(block: str, found: Sequence[FoundCall]) -> list[ParsedCall]:
        if is_typed and any(str(call.status) == "invalid_json" for call in found):
            raise ValueError("a value that is marked as JSON is none")
        calls = [call_of(call.name, call.arguments) for call in found]
        texts = list(_texts_between(block, opening, closing))
        values = [value for call in found for value in call.arguments.values()]
        if len(texts) != len(values):
            raise ValueError("a parameter stands there twice, or in no call")
        for text, value in zip(texts, values, strict=True):
            if not isinstance(value, str):
                read_json(text.partition(">")[2] if in_tag else text)
        return calls

    return check


_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"[{,]\s*+[^\s:,{}\[\]][^:,{}\[\]]*+:")


def _gemma_calls(block: str, found: Sequence[FoundCall]) -> list[ParsedCall]:
    calls = [call_of(call.name, call.arguments) for call in found]
    outside = "q".join(block.split(_QUOTE)[::2])  # texts may hold anything
    if len(_GEMMA_KEY.findall(outside)) != sum(_num_keys(call.arguments) for call in found):
        raise ValueError("an argument stands there twice")
    return calls


def _num_keys(value: object) -> int:
    """Returns how many keys all objects within a value have; the value is not nested deeply."""
    if isinstance(value, Mapping):
        return len(value) + sum(map(_num_keys, value.values()))
    return sum(map(_num_keys, value)) if isinstance(value, list) else 0


# ---- families ------------------------------------------------------------------------------------

_KIMI = FamilyCalls(
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    argument=JSON_STRING,
    atoms=(
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", _KIMI_ARGUMENTS, "<|tool_call_end|>"),
    ),
    shape=_section(
        "<|tool_calls_section_begin|>",
        rf"<\|tool_call_begin\|>[^<]++{re.escape(_KIMI_ARGUMENTS)}{_until('<|tool_call_end|>')}",
        "<|tool_calls_section_end|>",
    ),
    check=_kimi_calls,
    template=("<|tool_calls_section_begin|>", _KIMI_ARGUMENTS),
)
_MINIMAX = FamilyCalls(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    argument=_argument("<parameter name=", "</parameter>"),
    atoms=("<minimax:tool_call>", "</minimax:tool_call>"),
    shape=_section(
        "<minimax:tool_call>",
        rf'<invoke name="[^"]++">(?:\s*+<parameter name="[^"]++">{_until("</parameter>")})*+\s*+</invoke>',
        "</minimax:tool_call>",
    ),
    check=_tagged_calls("<parameter name=", "</parameter>", in_tag=True),
    template=("<minimax:tool_call>",),
)
_HY3 = FamilyCalls(
    opening="<tool_calls:opensource>",
    closing="</tool_calls:opensource>",
    argument=_argument("<arg_value:opensource>", "</arg_value:opensource>"),
    atoms=(
        *("<tool_calls:opensource>", "</tool_calls:opensource>"),
        *("<tool_call:opensource>", "</tool_call:opensource>", "<tool_sep:opensource>"),
        *("<arg_key:opensource>", "</arg_key:opensource>"),
        *("<arg_value:opensource>", "</arg_value:opensource>"),
    ),
    shape=_section(
        "<tool_calls:opensource>",
        r"<tool_call:opensource>[^<]++<tool_sep:opensource>"
        rf"(?:\s*+<arg_key:opensource>{_until('</arg_key:opensource>')}"
        rf"\s*+<arg_value:opensource>{_until('</arg_value:opensource>')})*+\s*+</tool_call:opensource>",
        "</tool_calls:opensource>",
    ),
    thought_marks=(("<think:opensource>", "</think:opensource>"),),
    check=_tagged_calls("<arg_value:opensource>", "</arg_value:opensource>"),
    template=("<tool_sep", ":opensource"),
)
_GEMMA4 = FamilyCalls(
    opening="<|tool_call>",
    closing="<tool_call|>",
    argument=_argument(_QUOTE, _QUOTE),
    atoms=("<|tool_call>", "<tool_call|>"),
    thought_marks=(("<|channel>thought", "<channel|>"),),
    check=_gemma_calls,
    template=("<|tool_call>", "<tool_call|>"),
)
_DEEPSEEK_V4 = FamilyCalls(
    opening="<｜DSML｜tool_calls>",
    closing="</｜DSML｜tool_calls>",
    argument=_argument("<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
    atoms=(),
    shape=_section(
        "<｜DSML｜tool_calls>",
        r'<｜DSML｜invoke name="[^"]++">'
        r'(?:\s*+<｜DSML｜parameter name="[^"]++" string="(?:true|false)">'
        rf"{_until('</｜DSML｜parameter>')})*+\s*+</｜DSML｜invoke>",
        "</｜DSML｜tool_calls>",
    ),
    check=_tagged_calls("<｜DSML｜parameter", "</｜DSML｜parameter>", in_tag=True, is_typed=True),
    template=("<｜DSML｜tool_calls>",),
)
_INKLING = FamilyCalls(
    opening="<|message_model|>",
    closing="<|end_message|>",
    argument=JSON_STRING,
    atoms=("<|message_model|>", "<|end_message|>", "<|content_invoke_tool_json|>"),
    thought_marks=(("<|content_thinking|>", "<|end_message|>"),),
    check=_inkling_calls,
    template=("<|content_invoke_tool_json|>",),
)
FAMILY_CALLS: Mapping[str, FamilyCalls] = MappingProxyType(
    {
        "kimi-k2": _KIMI,
        "kimi-k2.5": _KIMI,
        "minimax-m2": _MINIMAX,
        "hy3": _HY3,
        "gemma4": _GEMMA4,
        "deepseek-v4": _DEEPSEEK_V4,
        "inkling": _INKLING,
    }
)


def family_of_template(chat_template: str) -> str:
    """Returns the family whose marks a chat template writes; empty if it has marks of none."""
    for family, calls in FAMILY_CALLS.items():
        if all(text in chat_template for text in calls.template):
            return family
    return ""
