"""What a request holds its reply to, as a grammar: a JSON schema, a regex, calls of certain tools (pure).

For the engine, in the Lark dialect of the package llguidance. Thoughts stay free; how calls are written is
the form's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.api.basics.thoughts import THINK
from realsys.api.errors import DataError
from realsys.rollout.conversation.answer_forms import AnswerForm
from realsys.rollout.conversation.bounded_schemas import schema_of_arguments, with_bounds
from realsys.rollout.conversation.chat_messages import ChatRequest, ToolChoice
from realsys.rollout.conversation.endless_schemas import is_endless
from realsys.rollout.conversation.forms.call_syntax import JsonCallTexts

# Spaces as json.dumps has them: with free ones, small models write nothing else. Pydantic's unions are
# oneOf.
_WRITTEN = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
_COMMENTS = ("title", "description", "$comment")
_LARGEST_INTEGER = 2**53  # of what a double holds exactly
_FREE = r"FREE: /(.|\n)+/"
_WHITE = r"WHITE: /[\n ]{0,4}/"


@dataclass
class _Rules:
    """Rules of one grammar. ``special``: ids of the tokenizer's special tokens by their text."""

    special: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

    def literal(self, text: str) -> str:
        """Returns the expression for ``text``, which may hold special tokens."""
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        while text:
            found = [(at, -len(mark)) for mark in self.special if (at := text.find(mark)) >= 0]
            at, length = min(found, default=(len(text), 0))
            if at:
                yield json.dumps(text[:at], ensure_ascii=False)
            if length:
                yield f"<[{self.special[text[at : at - length]]}]>"
            text = text[at - length :]

    def json(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Adds a rule for JSON of one of ``schemas``; returns its name."""
        whole = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
        return self._add(f"%json {json.dumps({**whole, 'x-guidance': _WRITTEN})}")

    def until(self, marks: Sequence[str]) -> str:
        """Returns the expression for any text up to the first of ``marks``, with it."""
        ways = [f"FREE? {self.literal(mark)}" for mark in marks if mark in self.special]
        if texts := [_escaped(mark) for mark in marks if mark not in self.special]:
            ways.append(self._add(r"/(.|\n)*/", f"[suffix=/{'|'.join(texts)}/]"))
        return f"({' | '.join(ways)})"

    def without(self, marks: Sequence[str]) -> str:
        """Returns the expression for any text that has none of ``marks``, also where they are spelled."""
        texts = "|".join(_escaped(mark) for mark in marks)
        self.lines.append(rf"UNMARKED: /(.|\n)+/ & ~/(.|\n)*({texts})(.|\n)*/")
        return "UNMARKED?"

    def pattern(self, regex: str) -> str:
        """Adds a rule for a text that matches ``regex`` from its beginning to its end; returns its name."""
        slashes = re.compile(r"\\.|/|\n", re.DOTALL)
        escapes = {"/": "\\/", "\n": "\\n"}
        self.lines.append(f"PATTERN: /{slashes.sub(lambda m: escapes.get(m[0], m[0]), regex)}/")
        return "PATTERN"

    def _add(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def reply_grammar(
    request: ChatRequest,
    form: AnswerForm,
    *,
    thinking: bool,
    template: str,
    special: Mapping[str, int],
) -> str:
    """Returns the grammar of a reply; empty: the request leaves it free.

    With tools besides a schema, the policy calls them, if its family has calls, or answers by the schema.

    Args:
        thinking: the prompt has opened thoughts.
        template: of the chat: a policy may open thoughts of its own with marks that stand in it.
        special: special tokens of the tokenizer, their ids by text.
    Raises:
        DataError: the family's calls can't be written as a grammar.
    """
    forced = bool(request.tools) and request.tool_choice in (ToolChoice.REQUIRED, ToolChoice.ONE)
    some = bool(request.allowed_tools) and form.syntax is not None  # else none can be called
    if not (request.has_form or forced or some):
        return ""
    rules, ways, schemas = _Rules(special), list[str](), list[dict[str, Any]]()
    if request.has_form and not forced:
        ways += _text_ways(request, rules)
        if request.schema is not None:
            schemas.append(_own_root(request.schema, 0, request.schema_field))
    if request.tools and request.tool_choice is not ToolChoice.NONE and (forced or form.syntax):
        is_free = not (forced or request.has_form)
        calls = _call_schemas(request, _call_texts(request, form, is_free=is_free).arguments)
        for schema in calls:
            _check_values(schema, special, "tools")
        if made := _call_ways(request, form, rules, calls, is_free=is_free):
            ways += made
        else:  # nothing tells a call from other JSON
            schemas += calls
    if schemas:
        ways.append(rules.json(schemas))
    for schema in schemas:
        _check_values(schema, special, request.schema_field)
    marks = [m for m in form.thought_marks if thinking or m[0] in template]
    start = f"{_thoughts(marks, rules, thinking=thinking)} ({' | '.join(ways)})"
    return "\n".join([f"start: {start}", *rules.lines, _FREE, _WHITE])


def _text_ways(request: ChatRequest, rules: _Rules) -> list[str]:
    """Returns the expressions for the texts that the request names."""
    for text in (*request.choices, request.pattern):
        _check_values(text, rules.special, request.schema_field)
    ways = [rules.literal(text) for text in request.choices]
    return [*ways, rules.pattern(request.pattern)] if request.pattern else ways


def _call_texts(request: ChatRequest, form: AnswerForm, *, is_free: bool) -> JsonCallTexts:
    """Returns what stands around calls.

    Raises:
        DataError: they are no JSON, or other texts that the request allows may look like them.
    """
    texts = None if form.syntax is None else form.syntax.json_texts
    is_text = is_free or bool(request.choices or request.pattern)
    if texts is None or (is_text and not texts.before):
        raise DataError(
            f"calls of the form {form.name!r} can't be held to tools",
            where=request.schema_field if request.has_form else "tool_choice",
            fix="leave out tool_choice, and a schema besides tools",
        )
    return texts


def _call_ways(
    request: ChatRequest,
    form: AnswerForm,
    rules: _Rules,
    calls: Sequence[Mapping[str, Any]],
    *,
    is_free: bool,
) -> list[str]:
    """Returns the expressions for one call of ``calls`` or several, and for text with and without them
    where the reply is free; none: calls are JSON without marks."""
    texts = _call_texts(request, form, is_free=is_free)
    if form.syntax is None or not texts.before:
        return []
    call = rules.json(calls)
    before, between, after = map(rules.literal, (texts.before, texts.between, texts.after))
    # One that is named is called once, as clients expect
    once = request.one_call or request.tool_choice is ToolChoice.ONE
    more = "" if once else f" ({between} {call})*"
    if not is_free:
        return [f"{before} {call}{more} {after}"]
    marks = form.syntax.marks
    unmarked = rules.without(marks)
    (mark,) = [mark for mark in marks if texts.before.startswith(mark)]
    # Spelled in other tokens, a special one would be read as a call, too
    until = f"{unmarked} {rules.literal(mark)}" if mark in rules.special else rules.until([mark])
    begins = rules.literal(texts.before.removeprefix(mark))
    return [unmarked, f"{until} {begins} {call}{more} {after}"]


def _call_schemas(request: ChatRequest, key: str) -> list[dict[str, Any]]:
    """Returns the schemas of the calls that the request allows."""
    offered = {
        str(function.get("name", "")): schema_of_arguments(function.get("parameters"))
        for tool in request.tools
        if isinstance(function := tool.get("function"), Mapping)
    }
    if request.tool_choice is ToolChoice.ONE:
        offered = {request.tool_name: offered[request.tool_name]}
    if allowed := request.allowed_tools:
        offered = {name: schema for name, schema in offered.items() if name in allowed}
    for name, arguments in offered.items():
        if arguments.get("type") != "object":
            raise DataError(
                f"the arguments of tool {name!r} are no object",
                where="tools",
                fix='give its parameters "type": "object"',
            )
    return [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: _own_root(arguments, number, "tools")},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for number, (name, arguments) in enumerate(offered.items(), 1)
    ]


def _check_values(value: Any, special: Mapping[str, int], where: str) -> None:
    """Refuses what would not come back as it stands in a schema; ``where`` names it in the body."""
    if isinstance(value, str):
        if found := next((mark for mark in special if mark in value), None):
            raise DataError(
                f"a schema with the text {found!r}, which is a special token of the model",
                where=where,
                fix="leave it out",
            )
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise DataError(
            f"a schema with the integer {value}, which would be rounded",
            where=where,
            fix=f"use integers up to {_LARGEST_INTEGER}, or a text",
        )
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_values(key, special, where)
            if key not in _COMMENTS or not isinstance(inner, str):
                _check_values(inner, special, where)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_values(inner, special, where)


def _own_root(schema: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    """Returns the schema with a name of its own, so that its references stay within it, and with bounds.

    Raises:
        DataError: its references go round without an end. ``where`` names it in the body.
    """
    if is_endless(schema):
        raise DataError(
            "a schema whose references lead back to itself, so that no value of it has an end",
            where=where,
            fix="give it another way: null, or a property that is not required",
        )
    return {"$id": f"urn:reply:{number}", **with_bounds(schema)}


def _thoughts(marks: Sequence[tuple[str, str]], rules: _Rules, *, thinking: bool) -> str:
    if thinking:  # as forms read it: the first mark that closes any
        return f"{rules.until([closing for _, closing in marks] or [THINK[1]])} WHITE"
    ways = [f"{rules.literal(opening)} {rules.until([closing])}" for opening, closing in marks]
    return f"(({' | '.join(ways)}) WHITE)?" if ways else ""


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the tokens that llguidance takes for special, which are no text to it: their ids by text.

    Besides a tokenizer's own these are all added ones ``<…>``.
    """
    known: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    texts = {int(i): str(token.content) for i, token in known.items()}
    return {
        text: i
        for i, text in texts.items()
        if known[i].special or (text.startswith("<") and text.endswith(">"))
    }
