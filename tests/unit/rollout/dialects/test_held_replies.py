"""What bodies hold replies to, and to which tools: fields of the APIs and of other open servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import ChatRequest, ToolChoice
from realsys.rollout.dialects import anthropic_messages, chat_completions, responses_api
from realsys.rollout.dialects.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (chat_completions, responses_api, anthropic_messages)
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def read(dialect: Dialect, **fields: Any) -> ChatRequest:
    conversation = "input" if dialect is responses_api else "messages"
    return dialect.read(json.dumps({conversation: HI, **fields}).encode(), {})


def where_refused(dialect: Dialect, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(dialect, **fields)
    assert caught.value.fix
    return caught.value.where


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("fields", "where", "schema", "choices", "pattern"),
    [
        ({"guided_json": SCHEMA}, "guided_json", SCHEMA, (), ""),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", SCHEMA, (), ""),
        ({"guided_json": {}}, "guided_json", {}, (), ""),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA, (), ""),
        ({"guided_choice": ["a", "b"]}, "guided_choice", None, ("a", "b"), ""),
        ({"guided_regex": "a+"}, "guided_regex", None, (), "a+"),
        ({"regex": "a+"}, "regex", None, (), "a+"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", SCHEMA, (), ""),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", None, ("a",), ""),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", None, (), "a"),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            "structured_outputs.json_object",
            {"type": "object"},
            (),
            "",
        ),
    ],
)
def test_fields_of_other_servers_hold_or_are_refused_by_name(
    dialect: Dialect,
    fields: dict[str, Any],
    where: str,
    schema: Any,
    choices: tuple[str, ...],
    pattern: str,
) -> None:
    request = read(dialect, **fields)
    assert (request.schema, request.choices, request.pattern) == (schema, choices, pattern)
    assert (request.schema_field, request.must_hold, request.has_form) == (where, True, True)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": "a" * 8193}, "guided_regex"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": [1]}, "structured_outputs"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"structural_tag": "x"}, "structural_tag"),
    ],
)
def test_what_can_not_be_held_to_is_refused(
    dialect: Dialect, fields: dict[str, Any], where: str
) -> None:
    assert where_refused(dialect, **fields) == where


def test_a_reply_is_not_held_to_two_things() -> None:
    format = {"type": "json_object"}
    assert where_refused(chat_completions, response_format=format, regex="a") == "regex"
    assert where_refused(responses_api, text={"format": format}, regex="a") == "regex"
    assert where_refused(anthropic_messages, output_format=format, regex="a") == "regex"


def test_the_apis_own_schema_may_be_ignored_by_a_run() -> None:
    request = read(chat_completions, response_format={"type": "json_object"})
    assert (request.schema_field, request.must_hold) == ("response_format", False)


# ---- some of the tools


def tool(dialect: Dialect, name: str) -> dict[str, Any]:
    flat = {"type": "function", "name": name}
    nested = {"type": "function", "function": {"name": name}}
    return nested if dialect is chat_completions else flat


def allowed(dialect: Dialect, mode: Any, *names: str) -> dict[str, Any]:
    inner = {"mode": mode, "tools": [tool(dialect, name) for name in names]}
    if dialect is chat_completions:
        return {"type": "allowed_tools", "allowed_tools": inner}
    return {"type": "allowed_tools", **inner}


@pytest.mark.parametrize("dialect", [chat_completions, responses_api])
@pytest.mark.parametrize(
    ("mode", "names", "choice", "kept"),
    [
        ("auto", ("a",), ToolChoice.AUTO, ("a",)),
        ("required", ("c", "a", "c"), ToolChoice.REQUIRED, ("c", "a")),
        ("auto", ("a", "b", "c"), ToolChoice.AUTO, ()),
        ("required", ("a", "b", "c"), ToolChoice.REQUIRED, ()),
    ],
)
def test_some_of_the_tools_are_allowed(
    dialect: Dialect, mode: str, names: tuple[str, ...], choice: ToolChoice, kept: tuple[str, ...]
) -> None:
    tools = [tool(dialect, name) for name in "abc"]
    request = read(dialect, tools=tools, tool_choice=allowed(dialect, mode, *names))
    assert (request.tool_choice, request.allowed_tools) == (choice, kept)
    assert len(request.tools) == 3  # the prompt shows all


@pytest.mark.parametrize("dialect", [chat_completions, responses_api])
def test_other_choices_of_tools_are_refused(dialect: Dialect) -> None:
    tools = [tool(dialect, name) for name in "abc"]
    prefix = "tool_choice.allowed_tools" if dialect is chat_completions else "tool_choice"
    for choice, where in (
        (allowed(dialect, "none", "a"), f"{prefix}.mode"),
        (allowed(dialect, "auto"), f"{prefix}.tools"),
        (allowed(dialect, "auto", "a", "d"), f"{prefix}.tools[1]"),
    ):
        assert where_refused(dialect, tools=tools, tool_choice=choice) == where


def test_a_response_tells_which_tools_were_allowed() -> None:
    from realsys.rollout.dialects.response_object import response_object

    tools = [tool(responses_api, name) for name in "abc"]
    asked = read(responses_api, tools=tools, tool_choice=allowed(responses_api, "auto", "b"))
    assert response_object("r", 1, "m", asked)["tool_choice"] == {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "b"}],
    }
