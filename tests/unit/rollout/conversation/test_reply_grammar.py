"""What replies are held to: any text that a grammar lets through is read by the form as what was asked."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import AutoTokenizer

from realsys.api.errors import DataError
from realsys.generation.engine.token_grammar import GrammarReader, TokenGrammar, grammar_fault
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, ParsedAnswer
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolChoice
from realsys.rollout.conversation.reply_grammar import reply_grammar, special_tokens

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"$ref": "#/$defs/small"}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
                "required": ["a", "b"],
                "additionalProperties": False,
                "$defs": {"n": {"type": "integer", "minimum": -9, "maximum": 99}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "say_é",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string", "maxLength": 6}},
                "required": ["what"],
                "additionalProperties": False,
            },
        },
    },
)
TEMPLATE = "<think> [THINK]"  # of a model that may think or not
CALLING = ("hermes", "mistral", "llama3_json")


@pytest.fixture(scope="module", params=["text", "added", "special"])
def tokenizer(request: pytest.FixtureRequest, tiny_policy: Path) -> Any:
    """Marks as plain text, as added tokens (Qwen3) and as special tokens (Mistral)."""
    made = AutoTokenizer.from_pretrained(tiny_policy)
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]"]
    if request.param != "text":
        made.add_tokens(marks, special_tokens=request.param == "special")
    return made


@functools.cache
def reader_of(tokenizer: Any) -> GrammarReader:
    """One for all that is read with a tokenizer: making it reads the whole vocabulary."""
    return GrammarReader(tokenizer, vocabulary=len(tokenizer))


def request_of(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=(ChatMessage(role="user", content="How many?"),), **fields)


def read_one(
    tokenizer: Any, name: str, request: ChatRequest, *, thinking: bool, seed: int
) -> ParsedAnswer:
    """A text that the grammar lets through, drawn at random, as the form reads it."""
    form = ANSWER_FORMS[name]
    text = reply_grammar(
        request, form, thinking=thinking, template=TEMPLATE, special=special_tokens(tokenizer)
    )
    assert grammar_fault(text) == ""
    end = tokenizer.eos_token_id
    vocabulary = len(tokenizer)
    grammar = reader_of(tokenizer).read(text, stop_ids=frozenset({end}))
    draw, tokens = random.Random(seed), list[int]()
    closings = [tokenizer.encode(m, add_special_tokens=False) for m in ("</think>", "[/THINK]")]
    while True:
        allowed = _allowed(grammar, vocabulary)
        if allowed[end] and (draw.random() < 0.3 or allowed.sum() == 1):
            break
        allowed[end] = False
        token = draw.choice(allowed.nonzero()[0].tolist())
        # Thoughts may go on for ever: now and then their end is tried.
        way = draw.choice(closings) if draw.random() < 0.3 else [token]
        for part in way:
            if not allowed[part]:
                break
            tokens.append(part)
            grammar.take((part,))
            allowed = _allowed(grammar, vocabulary)
            allowed[end] = False
        assert len(tokens) < 5000
    answer = tokenizer.decode(tokens, skip_special_tokens=False)
    parsed = form.parse(answer, thinking=thinking, tools=bool(request.tools))
    assert not parsed.faults, answer
    return parsed


def _allowed(grammar: TokenGrammar, vocabulary: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
    return bits[:vocabulary].astype(bool)


def check_schema(parsed: ParsedAnswer) -> None:
    value = json.loads(parsed.content)
    assert value.keys() == {"answer", "sure"}
    assert 0 <= value["answer"] <= 9


def check_calls(parsed: ParsedAnswer, *names: str) -> None:
    assert parsed.calls
    assert parsed.content.strip() == ""
    for call in parsed.calls:
        assert call.name in names
        arguments = json.loads(call.arguments)
        if call.name == "add":
            assert arguments.keys() == {"a", "b"}
            assert all(-9 <= n <= 99 for n in arguments.values())
        else:
            assert len(arguments["what"]) <= 6


@pytest.mark.thorough
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", sorted(ANSWER_FORMS))
def test_a_schema_is_held_behind_free_thoughts(tokenizer: Any, name: str, thinking: bool) -> None:
    for seed in range(3):
        check_schema(
            read_one(tokenizer, name, request_of(schema=SCHEMA), thinking=thinking, seed=seed)
        )


@pytest.mark.thorough
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", CALLING)
def test_calls_are_of_the_tools_that_must_be_called(
    tokenizer: Any, name: str, thinking: bool
) -> None:
    required = request_of(tools=TOOLS, tool_choice=ToolChoice.REQUIRED, schema=SCHEMA)
    one = request_of(tools=TOOLS, tool_choice=ToolChoice.ONE, tool_name="say_é")
    called = set[str]()
    for seed in range(5):
        parsed = read_one(tokenizer, name, required, thinking=thinking, seed=seed)
        check_calls(parsed, "add", "say_é")
        called |= {call.name for call in parsed.calls}
        check_calls(read_one(tokenizer, name, one, thinking=thinking, seed=seed), "say_é")
    assert called == {"add", "say_é"}


@pytest.mark.parametrize("name", CALLING)
def test_with_tools_and_a_schema_it_is_the_one_or_the_other(tokenizer: Any, name: str) -> None:
    kinds = set[bool]()
    for seed in range(80):
        parsed = read_one(
            tokenizer, name, request_of(tools=TOOLS, schema=SCHEMA), thinking=False, seed=seed
        )
        kinds.add(bool(parsed.calls))
        if parsed.calls:
            check_calls(parsed, "add", "say_é")
        else:
            check_schema(parsed)
        if len(kinds) == 2:
            break
    assert kinds == {True, False}


def test_a_request_that_asks_for_neither_is_free() -> None:
    no_tools = request_of(tool_choice=ToolChoice.REQUIRED)
    for request in (request_of(), request_of(tools=TOOLS), no_tools):
        assert (
            reply_grammar(request, ANSWER_FORMS["hermes"], thinking=True, template="", special={})
            == ""
        )
    without = request_of(tools=TOOLS, tool_choice=ToolChoice.NONE, schema=SCHEMA)
    assert "tool_call" not in reply_grammar(
        without, ANSWER_FORMS["hermes"], thinking=False, template="", special={}
    )


@pytest.mark.parametrize("name", ["deepseek", "qwen3_coder", "plain", "plain_thoughts"])
def test_families_whose_calls_are_no_grammar_refuse_what_needs_one(name: str) -> None:
    form = ANSWER_FORMS[name]
    with golden.raises(DataError) as caught:
        reply_grammar(
            request_of(tools=TOOLS, tool_choice=ToolChoice.REQUIRED),
            form,
            thinking=False,
            template="",
            special={},
        )
    assert caught.value.where == "tool_choice"
    assert reply_grammar(request_of(schema=SCHEMA), form, thinking=False, template="", special={})


def test_special_tokens_are_those_of_the_library(tiny_policy: Path) -> None:
    made = AutoTokenizer.from_pretrained(tiny_policy)
    made.add_tokens(["<tool_call>", "[X]", "<half", "half>", "< >", "<a><b>"])
    made.add_special_tokens({"additional_special_tokens": ["[S]", "half"]})
    theirs = from_tokenizer(made)
    added = made.added_tokens_decoder
    assert special_tokens(made) == {
        str(token): i for i, token in added.items() if theirs.is_special_token(i)
    }
    assert {str(added[i]) for i in added} - special_tokens(made).keys() == {"[X]", "<half", "half>"}


@pytest.mark.parametrize("name", ["plain", "plain_thoughts"])
def test_a_family_without_calls_answers_by_the_schema_though_there_are_tools(
    tokenizer: Any, name: str
) -> None:
    both = request_of(tools=TOOLS, schema=SCHEMA)
    check_schema(read_one(tokenizer, name, both, thinking=False, seed=1))


def test_a_policy_whose_template_knows_no_thoughts_is_not_led_into_them() -> None:
    request, form = request_of(schema=SCHEMA), ANSWER_FORMS["hermes"]
    for template, thinking, opens in (
        ("", False, False),
        ("<think>", False, True),
        ("", True, False),
    ):
        text = reply_grammar(request, form, thinking=thinking, template=template, special={})
        assert ('"<think>"' in text) is opens
        assert ("suffix" in text) is (opens or thinking)


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": {"enum": ["a<eos>b"]}},
        {"schema": {"properties": {"<eos>": {"type": "null"}}}},
        {"schema": {"const": 2**53 + 1}, "schema_field": "text.format"},
        {
            "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}],
            "tool_choice": ToolChoice.REQUIRED,
        },
        {"tools": [{"function": {"name": "f<eos>"}}], "tool_choice": ToolChoice.REQUIRED},
        {"schema": {"$ref": "#"}, "schema_field": "response_format"},
        {
            "tools": [
                {
                    "function": {
                        "name": "f",
                        "parameters": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
                    }
                }
            ],
            "tool_choice": ToolChoice.REQUIRED,
        },
    ],
)
def test_what_would_not_come_back_as_it_stands_is_refused(fields: dict[str, Any]) -> None:
    with golden.raises(DataError):
        reply_grammar(
            request_of(**fields),
            ANSWER_FORMS["hermes"],
            thinking=False,
            template="",
            special={"<eos>": 2},
        )


def test_remarks_in_a_schema_are_free() -> None:
    schema = {"description": "up to <eos>", "type": "integer"}
    assert reply_grammar(
        request_of(schema=schema),
        ANSWER_FORMS["plain"],
        thinking=False,
        template="",
        special={"<eos>": 2},
    )


def test_a_tool_that_is_named_is_called_once(tokenizer: Any) -> None:
    one = request_of(tools=TOOLS, tool_choice=ToolChoice.ONE, tool_name="say_é")
    assert num_calls(tokenizer, one) == {1}


@pytest.mark.thorough
def test_one_call_is_one_and_else_there_may_be_more(tokenizer: Any) -> None:
    several = request_of(tools=TOOLS, tool_choice=ToolChoice.REQUIRED)
    assert num_calls(tokenizer, several) > {1}
    assert num_calls(tokenizer, replace(several, one_call=True)) == {1}


def num_calls(tokenizer: Any, request: ChatRequest) -> set[int]:
    found = [
        read_one(tokenizer, name, request, thinking=False, seed=seed)
        for name in CALLING
        for seed in range(8)
    ]
    return {len(parsed.calls) for parsed in found}
