"""What grammars of replies let through, text by text: some tools, no parameters, choices, formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import golden
import pytest
from chat_families import FAMILIES

from realsys.api.errors import DataError
from realsys.generation.engine.token_grammar import GrammarReader, grammar_fault
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS
from realsys.rollout.conversation.bounded_schemas import FORMAT_CHARS, with_bounds
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolChoice
from realsys.rollout.conversation.reply_grammar import reply_grammar, special_tokens

CHATML = FAMILIES["chatml"]
END = "<|im_end|>"


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = tuple(tool(name, parameters={"type": "object"}) for name in ("add", "sub", "mul"))


def call_of(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def request_of(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=(ChatMessage(role="user", content="How many?"),), **fields)


@cache
def reader() -> GrammarReader:
    return GrammarReader(CHATML.tokenizer, vocabulary=len(CHATML.tokenizer))


def grammar_of(
    request: ChatRequest, form: str = "hermes", *, special: Mapping[str, int] | None = None
) -> str:
    known = special_tokens(CHATML.tokenizer) if special is None else special
    text = reply_grammar(request, ANSWER_FORMS[form], thinking=False, template="", special=known)
    assert grammar_fault(text) == ""
    return text


def fits(grammar: str, text: str, *, spelled: bool = False) -> bool:
    """Whether the grammar takes a text to its end. ``spelled``: a token a letter, marks too."""
    tokenizer, end = CHATML.tokenizer, CHATML.tokenizer.convert_tokens_to_ids(END)
    held = reader().read(grammar, stop_ids=frozenset({end}))
    pieces = list(text) if spelled else [text]
    tokens = [t for piece in pieces for t in tokenizer.encode(piece, add_special_tokens=False)]
    try:  # not by masks: of texts that are the only way on, they allow one way to write them
        held.take(tokens)
    except DataError:
        return False
    return bool(held.allowed()[end // 32] >> (end % 32) & 1)


# ---- some of the tools


SOME = request_of(tools=TOOLS, allowed_tools=("add", "mul"))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("text", "is_let"),
    [
        ("", True),
        ("I'd rather not, as 1 < 2.", True),
        (call_of("add"), True),
        (call_of("mul", '{"a": 1}'), True),
        ("Well: " + call_of("add") + "\n" + call_of("mul"), True),
        (call_of("sub"), False),
        ("Well: " + call_of("sub"), False),
        (call_of("add") + "\n" + call_of("sub"), False),
        ("<tool_call> is how one calls", False),
        (call_of("adds"), False),
        (call_of("add") + " done", False),
    ],
)
def test_a_policy_may_call_these_tools_and_no_others(
    text: str, is_let: bool, special: bool
) -> None:
    marks = special_tokens(CHATML.tokenizer)
    assert "<tool_call>" in marks
    if not special:
        marks = {mark: token for mark, token in marks.items() if "tool_call" not in mark}
    grammar = grammar_of(SOME, special=marks)
    assert fits(grammar, text, spelled=not special) is is_let


def test_a_mark_in_other_tokens_is_no_way_around_it() -> None:
    grammar = grammar_of(SOME)
    assert not fits(grammar, call_of("sub"), spelled=True)
    assert fits(grammar, "<tool_cal", spelled=True)


def test_one_of_these_tools_must_be_called() -> None:
    required = request_of(tools=TOOLS, allowed_tools=("mul",), tool_choice=ToolChoice.REQUIRED)
    grammar = grammar_of(required)
    assert fits(grammar, call_of("mul"))
    assert not fits(grammar, call_of("add"))
    assert not fits(grammar, "no")


def test_an_answer_by_a_schema_or_a_call_of_these_tools() -> None:
    grammar = grammar_of(request_of(tools=TOOLS, allowed_tools=("mul",), schema={"const": 1}))
    assert fits(grammar, "1")
    assert fits(grammar, call_of("mul"))
    assert not fits(grammar, call_of("add"))
    assert not fits(grammar, "2")


def test_where_no_tool_can_be_called_nothing_is_held() -> None:
    plain = ANSWER_FORMS["plain"]
    assert reply_grammar(SOME, plain, thinking=False, template="", special={}) == ""


@pytest.mark.parametrize("form", ["llama3_json", "qwen3_coder", "deepseek"])
def test_families_whose_calls_may_stand_in_free_text_refuse_it(form: str) -> None:
    with golden.raises(DataError) as caught:
        grammar_of(SOME, form)
    assert caught.value.where == "tool_choice"


# ---- tools without parameters


@pytest.mark.parametrize(
    ("parameters", "takes", "takes_not"),
    [
        ({}, ["{}"], ['{"a": 1}', "1"]),
        ({"parameters": {}}, ["{}"], ['{"a": 1}']),
        ({"parameters": None}, ["{}"], ['{"a": 1}']),
        ({"parameters": {"type": "object", "properties": {}}}, ["{}"], ['{"a": 1}']),
        ({"parameters": {"properties": {}, "title": "f"}}, ["{}"], ['{"a": 1}']),
        ({"parameters": {"type": "object"}}, ["{}", '{"a": 1}'], ["1"]),
        ({"parameters": {"properties": {"a": {"type": "integer"}}}}, ['{"a": 1}'], ["1"]),
        (
            {"parameters": {"properties": {}, "additionalProperties": {"type": "integer"}}},
            ['{"a": 1}'],
            ['{"a": "b"}'],
        ),
        (
            {"parameters": {"properties": {}, "patternProperties": {"^a$": {"const": 1}}}},
            ['{"a": 1}'],
            [],
        ),
    ],
)
def test_a_tool_gets_the_arguments_that_it_takes(
    parameters: dict[str, Any], takes: list[str], takes_not: list[str]
) -> None:
    required = request_of(tools=(tool("f", **parameters),), tool_choice=ToolChoice.REQUIRED)
    grammar = grammar_of(required)
    assert [fits(grammar, call_of("f", text)) for text in takes] == [True] * len(takes)
    assert [fits(grammar, call_of("f", text)) for text in takes_not] == [False] * len(takes_not)


# ---- choices and regexes


@pytest.mark.parametrize(
    ("fields", "takes", "takes_not"),
    [
        (
            {"choices": ("yes", "no", 'a "b"/\n')},
            ["yes", "no", 'a "b"/\n'],
            ["y", "yesno", "", "a"],
        ),
        ({"pattern": r"[0-9]{1,3}/\d"}, ["1/2", "123/4"], ["1234/5", "1/", "a", ""]),
        ({"pattern": r"^a\/b$|c"}, ["a/b", "c"], ["a", "a/bc"]),
        ({"pattern": "a\nb"}, ["a\nb"], ["ab", "anb"]),
        ({"pattern": r"(?i)yes|nein?"}, ["YES", "nei"], ["ja"]),
    ],
)
def test_a_reply_is_one_of_some_texts(
    fields: dict[str, Any], takes: list[str], takes_not: list[str]
) -> None:
    grammar = grammar_of(request_of(**fields))
    assert [fits(grammar, text) for text in takes] == [True] * len(takes)
    assert [fits(grammar, text) for text in takes_not] == [False] * len(takes_not)


def test_with_tools_a_reply_is_a_choice_or_a_call() -> None:
    grammar = grammar_of(request_of(tools=TOOLS, choices=("yes",)))
    assert fits(grammar, "yes")
    assert fits(grammar, call_of("add"))
    assert not fits(grammar, "no")
    with pytest.raises(DataError) as caught:
        grammar_of(request_of(tools=TOOLS, choices=("{}",)), "llama3_json")
    assert caught.value.where == "response_format"


def test_what_is_no_text_to_the_tokenizer_is_refused() -> None:
    for fields in ({"choices": ("a", f"b{END}")}, {"pattern": f"b{END.replace('|', '.')}|{END}"}):
        with pytest.raises(DataError) as caught:
            grammar_of(request_of(**fields, schema_field="guided_choice"))
        assert caught.value.where == "guided_choice"


# ---- texts of a format


@pytest.mark.parametrize("wraps", ["text", "property", "reference", "arguments"])
def test_a_second_has_so_many_digits_and_no_more(wraps: str) -> None:
    """A policy that writes digits as long as it may comes to an end."""
    text: dict[str, Any] = {"type": "string", "format": "date-time"}
    inner = {"properties": {"t": text}, "required": ["t"]}
    by_name = {"$ref": "#/$defs/o", "$defs": {"o": inner}}
    schema = {"text": text, "property": inner, "reference": by_name, "arguments": inner}[wraps]
    start = '"2020-08-26T14:48:12.'
    if wraps != "text":
        start = '{"t": ' + start
    asked = request_of(schema=schema)
    if wraps == "arguments":
        start = '<tool_call>\n{"name": "f", "arguments": ' + start
        tools = (tool("f", parameters=inner),)
        asked = request_of(tools=tools, tool_choice=ToolChoice.REQUIRED)
    tokenizer = CHATML.tokenizer
    end = tokenizer.convert_tokens_to_ids(END)
    held = reader().read(grammar_of(asked), stop_ids=frozenset({end}))
    held.take(tokenizer.encode(start, add_special_tokens=False))
    (digit,) = tokenizer.encode("1", add_special_tokens=False)
    num_digits = 0
    while held.allowed()[digit // 32] >> (digit % 32) & 1:
        held.take([digit])
        num_digits += 1
        assert num_digits < 100
    assert 9 <= num_digits < FORMAT_CHARS["date-time"]
    held.take(tokenizer.encode('Z"', add_special_tokens=False))


@pytest.mark.parametrize("kind", sorted(FORMAT_CHARS))
def test_every_format_without_an_end_gets_one(kind: str) -> None:
    bounded = {"type": "string", "format": kind, "maxLength": FORMAT_CHARS[kind]}
    assert with_bounds({"type": "string", "format": kind}) == bounded
    assert grammar_of(request_of(schema=bounded))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date-time", "maxLength": 5000},
        {"format": "email", "enum": ["a@" + "b" * 400]},
        {"const": {"format": "date-time"}},
        {"default": {"format": "time"}, "examples": [{"format": "time"}]},
        {"properties": {"format": {"const": "date-time"}}},
        {"type": "string", "format": "uuid"},
        {"format": 5},
        {"items": True, "additionalProperties": False},
    ],
)
def test_bounds_of_the_schema_and_data_in_it_stay(schema: dict[str, Any]) -> None:
    assert with_bounds(schema) == schema


def test_a_bound_leaves_room_for_the_least_length() -> None:
    assert with_bounds({"format": "time", "minLength": 30})["maxLength"] >= 30
