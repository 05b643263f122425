"""Raw answers of each family: what their templates render is read back; no text breaks a reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.rollout.conversation.answer_forms import (
    ANSWER_FORMS,
    AnswerForm,
    ParsedAnswer,
    ParsedCall,
    form_of_template,
)

WEATHER = ParsedCall(name="get_weather", arguments='{"city":"Zürich","days":2}')
ADD = ParsedCall(name="add", arguments='{"a":1.5,"b":[1,{"c":"x\\ny"}],"d":null,"e":true}')
_WEATHER_JSON = '{"city": "Zürich", "days": 2}'
_ADD_JSON = '{"a": 1.5, "b": [1, {"c": "x\\ny"}], "d": null, "e": true}'
_QWEN_CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "add", "arguments": {_ADD_JSON}}}\n</tool_call>'
)
_CODER_WEATHER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
_CODER_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1.5\n</parameter>\n<parameter=b>\n"
    '[1, {"c": "x\\ny"}]\n</parameter>\n<parameter=d>\nnull\n</parameter>\n'
    "<parameter=e>\ntrue\n</parameter>\n</function>\n</tool_call>"
)
_CODER_ADD_OLD = _CODER_ADD.replace("null", "None").replace("true", "True")
_ADD_SCHEMA = {"properties": {"d": {"type": ["number", "null"]}, "e": {"type": "boolean"}}}
_GLM_WEATHER = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
_GLM_ADD = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1.5</arg_value>\n<arg_key>b</arg_key>\n"
    '<arg_value>[1, {"c": "x\\ny"}]</arg_value>\n<arg_key>d</arg_key>\n<arg_value>null</arg_value>\n'
    "<arg_key>e</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
)
_MISTRAL_LIST = (
    f'[{{"name": "get_weather", "arguments": {_WEATHER_JSON}, "id": "call00000"}}, '
    f'{{"name": "add", "arguments": {_ADD_JSON}, "id": "call00001"}}]'
)
_DEEPSEEK_FENCED = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{_WEATHER_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    f"{_ADD_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_DEEPSEEK_BARE = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_WEATHER_JSON}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{_ADD_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_ONE_LLAMA = f'{{"name": "get_weather", "parameters": {_WEATHER_JSON}}}'

# What the templates rendered after the prompt for an assistant message with two calls (Llama allows one):
# template → form, text, thinking, content, reasoning.
RECORDED: dict[str, tuple[str, str, bool, str, str]] = {
    "Qwen2.5": ("hermes", f"Let me see.\n{_QWEN_CALLS}", False, "Let me see.", ""),
    "Qwen3": (
        "hermes",
        f"<think>\nI think.\n</think>\n\nLet me see.\n{_QWEN_CALLS}",
        False,
        "Let me see.",
        "I think.",
    ),
    "Hermes 3": (
        "hermes",
        f'\n<tool_call>\n{{ "arguments": {_WEATHER_JSON}, "name": "get_weather"}}\n</tool_call> '
        f'\n<tool_call>\n{{ "arguments": {_ADD_JSON}, "name": "add"}}\n</tool_call> ',
        False,
        "",
        "",
    ),
    "Qwen3.6": (
        "qwen3_coder",
        f"I think.\n</think>\n\nLet me see.\n\n{_CODER_WEATHER}\n{_CODER_ADD}",
        True,
        "Let me see.",
        "I think.",
    ),
    "Qwen3.5": (
        "qwen3_coder",
        f"Let me see.\n\n{_CODER_WEATHER}\n{_CODER_ADD_OLD}",
        False,
        "Let me see.",
        "",
    ),
    "Nemotron 3": (
        "qwen3_coder",
        f"I think.\n</think>Let me see.\n{_CODER_WEATHER}\n{_CODER_ADD_OLD}\n",
        True,
        "Let me see.",
        "I think.",
    ),
    "GLM 4.5": (
        "glm",
        f"I think.</think>\nLet me see.\n{_GLM_WEATHER}\n{_GLM_ADD}",
        True,
        "Let me see.",
        "I think.",
    ),
    "GLM 5": (
        "glm",
        "<think>I think.</think>Let me see."
        + (_GLM_WEATHER + _GLM_ADD)
        .replace(">\n<", "><")
        .replace("get_weather\n", "get_weather")
        .replace("add\n", "add"),
        False,
        "Let me see.",
        "I think.",
    ),
    "Hy3's preview": (
        "hy3_preview",
        "<think>I think.</think>Let me see.\n<tool_calls>\n"
        + f"{_GLM_WEATHER}\n{_GLM_ADD}".replace("er\n<", "er<tool_sep>\n<").replace(
            "add\n", "add<tool_sep>\n"
        )
        + "\n</tool_calls>",
        False,
        "Let me see.",
        "I think.",
    ),
    "Nemotron Nano 2": (
        "nemotron_list",
        f"I think.\n</think>\n\nLet me see.\n\n<TOOLCALL>{_MISTRAL_LIST}</TOOLCALL>",
        True,
        "Let me see.",
        "I think.",
    ),
    "Jamba 1.5": (
        "jamba_list",
        f"Let me see.\n<tool_calls>[\n  {_MISTRAL_LIST[1:-1]}\n]</tool_calls>",
        False,
        "Let me see.",
        "",
    ),
    "Granite 3": ("granite_list", f"<|tool_call|>{_MISTRAL_LIST}", False, "", ""),
    "Granite 3.1": ("granite_list", f"<tool_call>{_MISTRAL_LIST}", False, "", ""),
    "Phi 4 mini": ("granite_list", f"<|tool_call|>{_MISTRAL_LIST}<|/tool_call|>", False, "", ""),
    "Mistral v3, SentencePiece": ("mistral", f"[TOOL_CALLS] {_MISTRAL_LIST}", False, "", ""),
    "Mistral v7": (
        "mistral",
        f"Let me see.[TOOL_CALLS]{_MISTRAL_LIST}",
        False,
        "Let me see.",
        "",
    ),
    "Mistral v11": (
        "mistral",
        f"<think>\nI think.\n</think>\nLet me see.[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]"
        f"{_WEATHER_JSON}[TOOL_CALLS]add[CALL_ID]call00001[ARGS]{_ADD_JSON}",
        False,
        "Let me see.",
        "I think.",
    ),
    "Mistral v13": (
        "mistral",
        f"[THINK]I think.[/THINK]Let me see.[TOOL_CALLS]get_weather[ARGS]{_WEATHER_JSON}"
        f"[TOOL_CALLS]add[ARGS]{_ADD_JSON}",
        False,
        "Let me see.",
        "I think.",
    ),
    "DeepSeek V3": ("deepseek", f"Let me see.{_DEEPSEEK_FENCED}", False, "Let me see.", ""),
    "DeepSeek R1": ("deepseek", f"I think.\n</think>\n\n{_DEEPSEEK_FENCED}", True, "", "I think."),
    "DeepSeek V3.1": ("deepseek", f"Let me see.{_DEEPSEEK_BARE}", False, "Let me see.", ""),
}


@pytest.mark.parametrize("template", RECORDED)
def test_what_a_template_renders_is_read_back(template: str) -> None:
    name, text, thinking, content, reasoning = RECORDED[template]
    answer = ANSWER_FORMS[name].parse(
        text, thinking=thinking, tools=True, schemas={"add": _ADD_SCHEMA}
    )
    expected = ParsedAnswer(content=content, reasoning=reasoning, calls=(WEATHER, ADD), faults=())
    assert answer == expected


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama_calls_are_the_whole_answer_and_may_be_several(tag: str) -> None:
    form = ANSWER_FORMS["llama3_json"]
    one = form.parse(tag + _ONE_LLAMA, thinking=False, tools=True)
    assert one == ParsedAnswer(content="", reasoning="", calls=(WEATHER,), faults=())
    two = f'{tag}{_ONE_LLAMA}; {{"type": "function", "name": "add", "parameters": {_ADD_JSON}}}'
    assert form.parse(two, thinking=False, tools=True).calls == (WEATHER, ADD)
    behind = f"{tag}{_ONE_LLAMA} That was it."
    answer = form.parse(behind, thinking=False, tools=True)
    assert (answer.content, answer.calls) == (behind, ())
    assert "extra text" in answer.faults[0]


SCHEMAS: dict[str, Any] = {"get_weather": {}, "add": {}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Let me see.\n\n{_ONE_LLAMA}", "Let me see.", (WEATHER,)),
        (f"Let me see: {_ONE_LLAMA}\n", "Let me see:", (WEATHER,)),
        (f"So.\n{_ONE_LLAMA}; {_ONE_LLAMA}", "So.", (WEATHER, WEATHER)),
        (f'{{"name": "Bob"}} is no call.\n{_ONE_LLAMA}', None, ()),  # begins as one, as ever
        (f'Known: {{"name": "Bob"}}.\n{_ONE_LLAMA}', 'Known: {"name": "Bob"}.', (WEATHER,)),
    ],
)
def test_a_llama_call_may_end_a_text(
    text: str, content: str | None, calls: tuple[ParsedCall, ...]
) -> None:
    answer = ANSWER_FORMS["llama3_json"].parse(text, thinking=False, tools=True, schemas=SCHEMAS)
    assert (answer.content, answer.calls) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('Say {"name": "get_fish", "parameters": {}}', 0),  # no such tool
        ('He is {"name": "Bob", "age": 3}', 0),
        ('He is {"name": "Bob", "age": 3} and {"name": 4', 1),
        ("One calls {} so.".replace("{}", _ONE_LLAMA), 1),  # goes on behind it
        (f"So:\n{_ONE_LLAMA[:-4]}", 1),  # cut off
        (f"So:\n{_ONE_LLAMA.replace('2', 'NaN')}", 1),
    ],
)
def test_json_that_a_llama_talks_about_is_no_call(text: str, faults: int) -> None:
    answer = ANSWER_FORMS["llama3_json"].parse(text, thinking=False, tools=True, schemas=SCHEMAS)
    assert (answer.content, answer.calls, len(answer.faults)) == (text, (), faults)


def test_json_that_is_no_call_is_an_answer_without_fault() -> None:
    text = '{"city": "Zürich", "days": 2}'
    answer = ANSWER_FORMS["llama3_json"].parse(text, thinking=False, tools=True)
    assert answer == ParsedAnswer(content=text, reasoning="", calls=(), faults=())


@pytest.mark.parametrize("template", RECORDED)
def test_without_tools_calls_stay_content(template: str) -> None:
    name, text, thinking, content, reasoning = RECORDED[template]
    answer = ANSWER_FORMS[name].parse(text, thinking=thinking, tools=False)
    assert (answer.calls, answer.faults, answer.reasoning) == ((), (), reasoning)
    calls = text.partition("</think>")[2] or text.partition("[/THINK]")[2] or text
    assert answer.content == (calls.lstrip() if reasoning else text)
    assert content in answer.content


BROKEN = {
    "a Python dict": (
        "hermes",
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        "Expecting",
    ),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        "not a JSON object",
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "no 'arguments'"),
    "a list": (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        "not a JSON object",
    ),
    "cut off": ("hermes", '<tool_call>{"name": "f", "argu', "Unterminated"),
    "NaN": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
    "infinity": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        "too large",
    ),
    "a key twice": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2, "a": 3}}</tool_call>',
        "'a' stands there twice",
    ),
    "a name twice": (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "name": "g", "arguments": {}}]',
        "twice",
    ),
    "too deep": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "}</tool_call>",
        "too deeply",
    ),
    "a huge number": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>",
        "too long",
    ),
    "an open parameter": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>\n1\n<parameter=b>\n2\n</parameter></function></tool_call>",
        "'a' is not closed",
    ),
    "JSON for tags": (
        "qwen3_coder",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "no <function=",
    ),
    "a parameter twice": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "twice",
    ),
    "no name": (
        "glm",
        "<tool_call>\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "no name",
    ),
    "a value that is missing": (
        "glm",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "value of 'a'",
    ),
    "a key that is open": (
        "glm",
        "<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>",
        "a key",
    ),
    "JSON for pairs": (
        "glm",
        '<tool_call>{"name": "f", "arguments": {}}\n{}</tool_call>',
        "no name",
    ),
    "an argument twice": (
        "glm",
        "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>",
        "twice",
    ),
    "no mark behind a name": (
        "hy3_preview",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_sep>",
    ),
    "a name and more": ("hy3_preview", "<tool_call>f<tool_sep>\ng</tool_call>", "<tool_sep>"),
    "no list": (
        "nemotron_list",
        '<TOOLCALL>{"name": "f", "arguments": {}}</TOOLCALL>',
        "not a list",
    ),
    "nothing in a list": ("jamba_list", "<tool_calls>[]</tool_calls>", "not a list"),
    "text behind a list": (
        "granite_list",
        '<|tool_call|>[{"name": "f", "arguments": {}}] So be it.',
        "extra text",
    ),
    "a built-in tool": ("llama3_json", '<|python_tag|>brave_search.call(query="x")', "Expecting"),
    "text after the mark": ("mistral", "[TOOL_CALLS] get weather", "Expecting"),
    "an object for the list": (
        "mistral",
        '[TOOL_CALLS] {"name": "f", "arguments": {}}',
        "not a list",
    ),
    "no fence": (
        "deepseek",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n[]<｜tool▁call▁end｜>",
        "a block of JSON",
    ),
    "an empty list": ("deepseek", "<｜tool▁calls▁begin｜> I wait.", "no call follows"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_stays_content_and_is_named(case: str) -> None:
    name, block, words = BROKEN[case]
    answer = ANSWER_FORMS[name].parse(f"So:\n{block}", thinking=False, tools=True)
    assert (answer.content, answer.calls) == (f"So:\n{block}", ())
    assert len(answer.faults) == 1
    assert answer.faults[0].startswith("call 1: ")
    assert words in answer.faults[0]


def test_good_calls_beside_a_broken_one_are_read() -> None:
    bad = "<tool_call>\n{}\n</tool_call>"
    good = f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}\n</tool_call>'
    text = f"One.\n{good}\n{bad}\nTwo.\n{good}\n"
    answer = ANSWER_FORMS["hermes"].parse(text, thinking=False, tools=True)
    assert answer.calls == (WEATHER, WEATHER)
    assert answer.content == f"One.\n{bad}\nTwo."
    golden.check(answer.faults)


_W = "<｜tool▁call▁begin｜>w<｜tool▁sep｜>"
_NOW = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_GLM_NOW = "<tool_call>now</tool_call>"
_CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
# Answers with marks within an argument's own text: form → text, arguments of the calls of w in it, faults.
MARKS_IN_TEXTS: list[tuple[str, str, list[str], int]] = [
    *(
        ("hermes", f'<tool_call>{{"name": "w", "arguments": {{"c": "{text}"}}}}{end}', [text], 0)
        for text in ("x</tool_call>y<tool_call>z", '\\"</tool_call>', "</think>")
        for end in ("</tool_call>", "\n</tool_call>\n", "")
    ),
    ("hermes", '<tool_call>{"name": "w", "arguments": {"c": "x</tool_call>', [], 1),
    (
        "hermes",
        '<tool_call>\n{"name": "w, "arguments": {"c": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "w", "arguments": {"c": "b"}}\n</tool_call>',
        ["b"],
        1,
    ),
    *(
        ("mistral", f'[TOOL_CALLS]{head}{{"c": "{text}"}}', [text], 0)
        for text in ("x[ARGS]{}[TOOL_CALLS]now[ARGS]{}", "]] [TOOL_CALLS] [{", '\\"[TOOL_CALLS]')
        for head in ("w[ARGS]", "w", "w[CALL_ID]Ab3dE6gH0[ARGS]")
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "w", "arguments": {"c": "]] [TOOL_CALLS] [{"}}]',
        ["]] [TOOL_CALLS] [{"],
        0,
    ),
    (
        "mistral",
        '[TOOL_CALLS]w[ARGS]{"c": "a"} 5" long [TOOL_CALLS]w[ARGS]{"c": "b"}',
        ["a", "b"],
        0,
    ),
    ("mistral", '[TOOL_CALLS]w[ARGS]{"c": "x[TOOL_CALLS]now[ARGS]{}', [], 1),  # cut off
    ("mistral", '[TOOL_CALLS]w[ARGS]{"c": "\n[TOOL_CALLS]now[ARGS]{}\n"}', [], 1),  # not valid
    ("mistral", '[TOOL_CALLS]w[ARGS]{c: 1}[TOOL_CALLS]w[ARGS]{"c": "b"}', ["b"], 1),
    *(
        (
            "nemotron_list",
            f'<TOOLCALL>[{{"name": "w", "arguments": {{"c": "{said}"}}}}]{end}',
            [said],
            0,
        )
        for said in ("x</TOOLCALL>y<TOOLCALL>[]", "</TOOLCALL>")
        for end in ("</TOOLCALL>", "")
    ),
    ("deepseek", f'{_W}{{"c": "{_NOW}"}}<｜tool▁call▁end｜>', [_NOW], 0),
    ("deepseek", f'{_W}{{"c": "{_NOW}', [], 1),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n"
        f'{{"c": "{_NOW}"}}\n```<｜tool▁call▁end｜>',
        [_NOW],
        0,
    ),
    *(
        (
            "glm",
            f"<tool_call>w\n<arg_key>c</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
            [text],
            0,
        )
        for text in ("x</tool_call>y", f"x{_GLM_NOW}y", f"x</tool_call>{_GLM_NOW}")
    ),
    (
        "hy3_preview",
        f"<tool_calls>\n<tool_call>w<tool_sep>\n<arg_key>c</arg_key>\n<arg_value></tool_calls>{_GLM_NOW}"
        "</arg_value>\n</tool_call>\n</tool_calls>",
        [f"</tool_calls>{_GLM_NOW}"],
        0,
    ),
    ("glm", f"<tool_call>w<arg_key>c</arg_key><arg_value>x</tool_call>{_GLM_NOW}", [], 1),
    (
        "glm",
        "<tool_call>w<arg_key>c</arg_key><arg_value><tool_call>now<arg_key>c</arg_key>"
        "<arg_value>x</arg_value></tool_call></arg_value></tool_call>",
        [],
        1,
    ),
    *(
        (
            "qwen3_coder",
            f"{opening}<function=w>\n<parameter=c>\n{text}\n</parameter>\n</function>{closing}",
            [text],
            0,
        )
        for text in ("x</tool_call>y", "x</function>", _CODER_NOW, f"</function>\n{_CODER_NOW}")
        for opening, closing in (("<tool_call>\n", "\n</tool_call>"), ("", ""))
    ),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=w>\n<parameter=c>\nx\n</function>\n</tool_call>\n{_CODER_NOW}",
        [],
        1,
    ),
    ("qwen3_coder", "<tool_call>\n<function=w>\n<parameter=c>\nx\n</parameter>\n", [], 1),
    ("qwen3_coder", "<function=w>\n<parameter=c>\nx\n</parameter>\n", [], 1),
    ("qwen3_coder", "<tool_call>\n<function=w>", [], 1),
    (
        "qwen3_coder",
        "<tool_call>\n<function=w>\n<parameter=c>\nx\n</parameter>\n</function>\n",
        ["x"],
        0,
    ),
]


@pytest.mark.parametrize(("name", "text", "arguments", "faults"), MARKS_IN_TEXTS)
def test_marks_within_an_argument_end_and_begin_nothing(
    name: str, text: str, arguments: list[str], faults: int
) -> None:
    schemas = {"w": {"properties": {"c": {"type": "string"}}}}
    answer = ANSWER_FORMS[name].parse(text, thinking=False, tools=True, schemas=schemas)
    called = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    is_json = name in ("mistral", "hermes", "nemotron_list")
    assert called == [("w", {"c": json.loads(f'"{a}"') if is_json else a}) for a in arguments]
    assert len(answer.faults) == faults
    assert arguments or answer.content == text


def test_a_missing_closing_tag_at_the_end_is_forgiven() -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}\n'
    assert ANSWER_FORMS["hermes"].parse(text, thinking=False, tools=True).calls == (WEATHER,)


@pytest.mark.parametrize("end", ["", "\n</tool_call>", "\n</tool_call>\n", "\nDone."])
def test_a_function_without_its_outer_tag_is_a_call(end: str) -> None:
    inner = _CODER_WEATHER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    text = f"Now.\n\n{inner}{end}"
    answer = ANSWER_FORMS["qwen3_coder"].parse(text, thinking=False, tools=True)
    assert (answer.calls, answer.faults) == ((WEATHER,), ())
    assert answer.content == ("Now.\nDone." if "Done" in end else "Now.")


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({}, "2", 2),
        ({}, "Zürich", "Zürich"),
        ({}, "True", "True"),
        ({"type": "string"}, "2", "2"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "many", "many"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "2", "2"),
        ({"type": ["string", "number"]}, "2", 2),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": ["string", "null"]}, 7]}, "2", "2"),
        ({"type": 7, "anyOf": 7}, "2", 2),
        ({"type": [{}, []], "anyOf": [{"type": {}}]}, "2", 2),
        ("nonsense", "2", 2),
    ],
)
def test_the_schema_tells_texts_from_other_values(schema: Any, value: str, expected: Any) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    answer = ANSWER_FORMS["qwen3_coder"].parse(
        text, thinking=False, tools=True, schemas={"f": {"properties": {"a": schema}}}
    )
    assert json.loads(answer.calls[0].arguments) == {"a": expected}


@pytest.mark.parametrize(
    "schemas", [{}, {"get_weather": 7}, {"get_weather": {"properties": []}}, None]
)
def test_schemas_may_be_anything_that_clients_write(schemas: Any) -> None:
    form = ANSWER_FORMS["qwen3_coder"]
    answer = form.parse(_CODER_WEATHER, thinking=False, tools=True, schemas=schemas)
    assert answer.calls == (WEATHER,)


def test_a_value_keeps_its_own_newlines() -> None:
    value = "\n  def f():\n    pass\n\n"
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    answer = ANSWER_FORMS["qwen3_coder"].parse(text, thinking=False, tools=True)
    assert json.loads(answer.calls[0].arguments) == {"a": value}


def test_a_lone_surrogate_is_written_as_utf8_can_carry_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800ü"}}</tool_call>'
    (call,) = ANSWER_FORMS["hermes"].parse(text, thinking=False, tools=True).calls
    assert call.arguments.encode() == b'{"a":"\\ud800\\u00fc"}'


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>a</think>b ", False, "a", "b "),
        ("\n<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("<think>\na</think>b", True, "a", "b"),  # opened once more
        ("a</think>b", False, "", "a</think>b"),
        ("b <think>a</think>", False, "", "b <think>a</think>"),
        ("<think>a", False, "a", ""),
        (" a\n", True, "a", ""),
        ("</think>b</think>", True, "", "b</think>"),
        (" b ", False, "", " b "),
        ("", False, "", ""),
    ],
)
def test_thoughts_end_before_the_content(
    text: str, thinking: bool, reasoning: str, content: str
) -> None:
    for name in ("hermes", "qwen3_coder", "glm", "mistral", "deepseek", "plain_thoughts"):
        answer = ANSWER_FORMS[name].parse(text, thinking=thinking, tools=True)
        assert answer == ParsedAnswer(content=content, reasoning=reasoning, calls=(), faults=())


def test_forms_without_thoughts_read_only_those_that_the_template_opened() -> None:
    for name in ("plain", "llama3_json"):
        answer = ANSWER_FORMS[name].parse("<think>a</think>b", thinking=False, tools=True)
        assert (answer.reasoning, answer.content) == ("", "<think>a</think>b")
        answer = ANSWER_FORMS[name].parse("a</think>b", thinking=True, tools=True)
        assert (answer.reasoning, answer.content) == ("a", "b")


def test_a_call_within_thoughts_is_none_and_is_named_if_they_never_end() -> None:
    call = f'<tool_call>{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}</tool_call>'
    answer = ANSWER_FORMS["hermes"].parse(f"{call}</think>b", thinking=True, tools=True)
    assert answer == ParsedAnswer(content="b", reasoning=call, calls=(), faults=())
    answer = ANSWER_FORMS["hermes"].parse(call, thinking=True, tools=True)
    assert (answer.reasoning, answer.calls) == (call, ())
    golden.check(answer.faults)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ \'<tool_call>\\n{"name": "\' + c.name + \'", "arguments": \' }}', "hermes"),
        ("{{ '<tool_call>\\n<function=' + c.name + '>\\n<parameter=' }}</think>", "qwen3_coder"),
        ("{{ '<seed:tool_call><function=' + c.name + '><parameter=' }}", "plain"),
        ("{{ '<tool_call>' + c.name }}<arg_key>{{ arguments }}</think>", "plain_thoughts"),
        ("{{ '<tool_call>' + c.name }}<arg_key><arg_value>{{ arguments }}</think>", "glm"),
        ("{{ '<|start_header_id|>' }}{{ '\"parameters\": ' }}", "llama3_json"),
        ("{{ '<|start_header_id|>' + role }}", "plain"),
        (
            "{{ '<tool_calls><tool_call>' + c.name + '<tool_sep><arg_key><arg_value>' }}",
            "hy3_preview",
        ),
        ("{{ '<TOOLCALL>[' + arguments + ']</TOOLCALL>' }}</think>", "nemotron_list"),
        ("{{ '<tool_calls>[' + arguments + ']</tool_calls>' }}", "jamba_list"),
        ("{{ '<|tool_call|>' + arguments }}", "granite_list"),
        ("{{ '<|tool_call>' + arguments }}", "plain"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ '<｜tool▁call▁begin｜>' + name }}<think></think>", "deepseek"),
        ("{{ '<|im_start|>' + role + content }}", "plain"),
        ("", "plain"),
    ],
)
def test_a_template_is_known_by_the_marks_that_it_writes(template: str, name: str) -> None:
    assert form_of_template(template).name == name


def _render_hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"


def _render_coder(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>\n"


def _render_glm(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>\n"


def _render_deepseek(name: str, arguments: Mapping[str, Any]) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>\n"
    )


RENDERERS: dict[str, tuple[Callable[[str, Mapping[str, Any]], str], str]] = {
    "hermes": (_render_hermes, ""),
    "qwen3_coder": (_render_coder, ""),
    "glm": (_render_glm, ""),
    "llama3_json": (lambda n, a: json.dumps({"name": n, "parameters": a}), ";"),
    "mistral": (lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}", ""),
    "deepseek": (_render_deepseek, ""),
    "jamba_list": (
        lambda n, a: f"<tool_calls>[{json.dumps({'name': n, 'arguments': a})}]</tool_calls>",
        "",
    ),
}
FORMS = list(ANSWER_FORMS.values())
NAMES = st.from_regex(r"[a-zA-Z_][\w.-]{0,20}", fullmatch=True).filter(str.isascii)
TEXTS = st.text(st.characters(exclude_characters="<[\r", exclude_categories=["Cs"]), max_size=20)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    LEAVES | TEXTS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3)
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3
)
PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "[THINK]",
            "[/THINK]",
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
        ),
        *("<parameter=a>", "</parameter>", "</function>", "<|python_tag|>", ";", "[TOOL_CALLS]"),
        *(
            "<TOOLCALL>",
            "</TOOLCALL>",
            "<tool_calls>",
            "</tool_calls>",
            "<|tool_call|>",
            "<tool_sep>",
        ),
        *("[ARGS]", "[CALL_ID]", "f", "[", "]", "{", "}", '"', "\\", "\n", " ", "ü", "null"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "function",
            "```json\n",
            "```",
        ),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", '{"name": "f", "arguments": {}}'),
        *('{"name": "f", "parameters": {"a": "</tool_call>"}}', '[{"name": "f", "arguments": {}}]'),
        "function<｜tool▁sep｜>f\n```json\n{}\n```",
    ]
)
SALADS = st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=25)
@given(calls=CALLS)
def test_calls_come_back_as_they_were_rendered(
    name: str, calls: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    render, separator = RENDERERS[name]
    text = separator.join(render(called, arguments) for called, arguments in calls)
    # One tool may be called with a text and with a number: then no schema could tell them apart.
    schemas = {
        called: {"properties": {k: {"type": "string"} for k, v in a.items() if isinstance(v, str)}}
        for called, a in calls
    }
    if len(schemas) < len(calls):
        return
    answer = ANSWER_FORMS[name].parse(text, thinking=False, tools=True, schemas=schemas)
    assert answer.faults == ()
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.content == ""


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=60)
@given(text=SALADS, thinking=st.booleans(), tools=st.booleans())
def test_what_is_streamed_is_never_taken_back(
    form: AnswerForm, text: str, thinking: bool, tools: bool
) -> None:
    content = form.parse(text, thinking=thinking, tools=tools).content
    shown = ""
    for length in range(len(text) + 1):
        longer = form.safe_prefix(text[:length], thinking=thinking, tools=tools)
        assert longer.startswith(shown)
        shown = longer
    assert content.startswith(shown)


_BARE_FUNCTION = _CODER_WEATHER.removeprefix("<tool_call>\n")
STREAMED = [
    *((name, text, thinking) for name, text, thinking, _, _ in RECORDED.values()),
    *((name, block, False) for name, block, _ in BROKEN.values() if len(block) < 1000),
    ("qwen3_coder", f"Now.\n{_BARE_FUNCTION}\n", False),
    *((name, text, False) for name, text, _, _ in MARKS_IN_TEXTS),
    ("llama3_json", f" \n{_ONE_LLAMA}", False),
    ("llama3_json", f"Now: <|python_tag|>{_ONE_LLAMA};\n{_ONE_LLAMA}", False),
    (
        "deepseek",
        f" {_DEEPSEEK_BARE.replace('<｜tool▁call▁begin｜>', ' <｜tool▁call▁begin｜>')}",
        False,
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize("behind", ["", " Done. ", "\n<tool_call>", "[TOOL_CALLS]"])
@pytest.mark.parametrize(("name", "text", "thinking"), STREAMED)
def test_no_cut_of_a_call_is_shown_as_content(
    name: str, text: str, thinking: bool, behind: str
) -> None:
    form = ANSWER_FORMS[name]
    whole = f"So. {text}{behind}" if not thinking else text + behind
    for complete in (whole, text + behind):
        content = form.parse(complete, thinking=thinking, tools=True).content
        shown = ""
        for length in range(len(complete) + 1):
            longer = form.safe_prefix(complete[:length], thinking=thinking, tools=True)
            assert longer.startswith(shown)
            shown = longer
        assert content.startswith(shown)


def test_content_is_streamed_as_soon_as_it_is_sure() -> None:
    form = ANSWER_FORMS["hermes"]
    good = f'<tool_call>{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}</tool_call>'
    for text, shown in (
        ("<thi", ""),
        ("<think>a</think>\n", ""),
        ("<think>a</think>\nb", "b"),
        ("b c", "b c"),
        ("b \n", "b"),
        ("b <", "b"),
        ("b < c", "b < c"),
        ("b <tool_cal", "b"),
        ("b <tool_call>{}", "b"),
        ("b <tool_call>{}</tool_call>", "b <tool_call>{}</tool_call>"),
        (f"b {good} ", "b"),
        (f"b {good} c", "b\nc"),
    ):
        assert form.safe_prefix(text, thinking=False, tools=True) == shown
    assert form.safe_prefix("b <tool_call>{} ", thinking=False, tools=False) == "b <tool_call>{} "
    assert form.safe_prefix("b", thinking=True, tools=True) == ""
    assert ANSWER_FORMS["llama3_json"].safe_prefix(' {"a": 1}', thinking=False, tools=True) == ""
