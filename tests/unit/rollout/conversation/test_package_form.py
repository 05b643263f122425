"""Answers whose calls the package renderers reads: what it may not do, and that streams agree."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from call_cases import SCHEMAS, calls_of, cases
from package_families import OF_PACKAGE

from launcher.plan.answer_form import answer_form_lines
from launcher.submit.submit import packages_of_rollouts
from realsys.api.errors import ConfigError
from realsys.config import extras
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.conversation import form_choice
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, AnswerForm, ParsedAnswer
from realsys.rollout.conversation.answer_reading import opens_thoughts, read_answer
from realsys.rollout.conversation.form_choice import (
    FORM_NAMES,
    choose_form,
    form_of_family,
    needed_by_form,
    shown_form,
)
from realsys.rollout.conversation.forms.family_calls import FAMILY_CALLS, family_of_template
from realsys.rollout.conversation.package_form import MOST_CHARACTERS, PackageForm
from realsys.rollout.conversation.package_renderer import FAMILIES, PACKAGES
from realsys.rollout.runners.form_of_run import answer_form

BY_PACKAGE = list(FAMILY_CALLS)
KIMI = (
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' }}"
)
_FORMS: dict[str, AnswerForm] = {}


def form_of(family: str) -> AnswerForm:
    if family not in _FORMS:
        tokenizer = OF_PACKAGE[family].tokenizer
        _FORMS[family] = choose_form("", tokenizer, renderer=family, template="")
    return _FORMS[family]


def read(family: str, text: str, *, thinking: bool = False) -> ParsedAnswer:
    return form_of(family).parse(text, thinking=thinking, tools=True, schemas=SCHEMAS)


@pytest.mark.parametrize("family", OF_PACKAGE)
def test_what_a_family_writes_is_read_and_broken_calls_are_none(family: str) -> None:
    for name, case in cases(family).items():
        answer = read(family, case.text)
        calls = [(call.name, call.arguments) for call in answer.calls]
        if name == "NaN" and calls:  # between tags it is a text
            assert json.loads(calls[0][1])["days"] == "NaN", name
            continue
        assert calls_of(calls) == case.calls, name
        assert answer.reasoning == case.reasoning or name == "in thoughts", name
        assert case.content is None or answer.content == case.content, name
        assert bool(answer.faults) == (not calls and name != "in thoughts"), name


@pytest.mark.parametrize("family", BY_PACKAGE)
def test_an_answer_that_grows_shows_the_beginning_of_the_whole(family: str) -> None:
    form, rng = form_of(family), random.Random(family)
    for case in cases(family).values():
        for text in (case.text, f"{case.text}\nSo be it.", f"Oh. {case.text}{case.text}"):
            whole = form.parse(text, thinking=False, tools=True, schemas=SCHEMAS).content
            shown = ""
            for end in sorted(rng.sample(range(len(text) + 1), 25)):
                more = form.safe_prefix(text[:end], thinking=False, tools=True)
                assert more.startswith(shown)
                shown = more
            assert whole.startswith(shown)


@pytest.mark.parametrize("family", BY_PACKAGE)
def test_without_tools_calls_stay_content(family: str) -> None:
    text = cases(family)["one call"].text
    answer = form_of(family).parse(text, thinking=False, tools=False)
    assert (answer.content, answer.calls, answer.faults) == (text, (), ())


@pytest.mark.parametrize("family", BY_PACKAGE)
def test_thoughts_that_the_prompt_opens_are_thoughts(family: str) -> None:
    opening, closing = FAMILY_CALLS[family].thought_marks[0]
    tokenizer = OF_PACKAGE[family].tokenizer
    prompt = tokenizer.encode(f"x{opening}\n", add_special_tokens=False)
    usual = opening == "<think>"  # which renderers look for
    assert opens_thoughts(form_of(family), prompt, tokenizer.decode) == (not usual)
    call = cases(family)["one call"].text.rpartition("<|message_model|>")[2]
    inside = read(family, f"because{closing}Done.", thinking=True)
    assert (inside.reasoning, inside.content, inside.calls) == ("because", "Done.", ())
    open_end = read(family, f"so {call.removesuffix(closing)}", thinking=True)
    assert (open_end.content, open_end.calls) == ("", ())


# ---- what the package may not do -----------------------------------------------------------------


@pytest.mark.parametrize("family", BY_PACKAGE)
def test_a_longer_block_than_the_package_may_get_is_text(family: str) -> None:
    for long, calls in ((MOST_CHARACTERS // 2, 1), (MOST_CHARACTERS, 0)):
        text = cases(family)["one call"].text.replace("Zürich", "Z" * long)
        answer = read(family, text)
        assert (len(answer.calls), len(answer.faults)) == (calls, 1 - calls)
        passed = "<|content_text|><|end_message|>"  # Inkling's, without a meaning
        assert answer.content == ("" if calls else text.removeprefix(passed))


def test_what_the_package_raises_leaves_the_answer_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    form = PackageForm(OF_PACKAGE["kimi-k2"].tokenizer, "kimi-k2", where="")
    case = cases("kimi-k2")["text before"]
    for error in (RecursionError(), KeyError("x"), AssertionError(), MemoryError()):

        def fails(*args: Any, error: Exception = error, **more: Any) -> Any:
            raise error

        monkeypatch.setattr(form.syntax._reader._package, "parse_response", fails)  # type: ignore[union-attr]
        answer = form.parse(case.text, thinking=False, tools=True)
        assert (answer.content, answer.calls, len(answer.faults)) == (case.text, (), 1)


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("kimi-k2", '"where"', '"city"'),
        ("kimi-k2", '{"a"', '{"a": 1e999, "b"'),
        ("kimi-k2", "[1,", "[-Infinity,"),
        ("kimi-k2", '{"city"', '[{"city"'),
        ("inkling", '{"a"', '{"a":1,"a"'),
        ("inkling", '"args"', '"arguments"'),
        ("minimax-m2", "[1,", "[NaN,"),
        ("minimax-m2", '{"a"', '{"a": 1, "a"'),
        ("kimi-k2", "<|tool_call_end|>", "<|tool_call_end|>x"),
        ("minimax-m2", "</invoke>", "x</invoke>"),
        ("hy3", "<tool_sep:opensource>", "<tool_sep:opensource>x"),
        ("minimax-m2", "<invoke", '<parameter name="city">x</parameter><invoke'),
        ("hy3", "[1,", "[Infinity,"),
        ("hy3", "</arg_value:opensource>", ""),
        ("gemma4", "[1,", "[1e999,"),
        ("gemma4", "{a:", '{a:1,<|"|>a<|"|>:'),
        ("gemma4", "where:", "city:"),
        ("deepseek-v4", "[1,", "[NaN,"),
        ("deepseek-v4", "271828", "many"),  # said to be JSON
        ("deepseek-v4", "nights", "city"),
    ],
)
def test_what_the_package_lets_pass_is_no_call(family: str, old: str, new: str) -> None:
    good = cases(family)["one call"].text
    assert old in good
    answer = read(family, good.replace(old, new))
    assert (answer.calls, len(answer.faults)) == ((), 1)


_KIMI_CALL = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
# Whole calls without arguments, between marks that end a block and begin one.
WHOLE_CALLS = {
    "kimi-k2": f"<|tool_calls_section_begin|>{_KIMI_CALL}<|tool_calls_section_end|>",
    "minimax-m2": '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    "hy3": "<tool_calls:opensource><tool_call:opensource>now<tool_sep:opensource>"
    "</tool_call:opensource></tool_calls:opensource>",
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "deepseek-v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
    "inkling": '<|message_model|>now<|content_invoke_tool_json|>{"args": {}}<|end_message|>',
}


@pytest.mark.parametrize("family", WHOLE_CALLS)
def test_a_call_within_an_argument_is_none(family: str) -> None:
    inner = WHOLE_CALLS[family]
    said = inner.replace('"', '\\"') if family in ("kimi-k2", "inkling") else inner
    said = f"x{FAMILY_CALLS[family].closing}{said}"
    text = cases(family)["one call"].text.replace("Zürich", f"{said}y")
    cut = text[: text.index(said) + len(said)]
    for answer, names in ((text, []), (cut, []), (text + inner, ["now"])):
        found = read(family, answer)
        assert [call.name for call in found.calls] == names
        assert len(found.faults) == 1


def test_a_tool_that_the_request_does_not_have_is_called_as_in_other_forms() -> None:
    for family in BY_PACKAGE:
        text = cases(family)["one call"].text.replace("get_weather", "get_fish")
        assert [call.name for call in read(family, text).calls] == ["get_fish"]


def test_texts_are_never_normalised() -> None:
    for family in BY_PACKAGE:
        case = cases(family)["text before"]
        text = case.text.replace("Let me see.", "e\u0301 \ufb01").replace("Zürich", "Zu\u0308")
        answer = read(family, text)
        assert answer.content == "e\u0301 \ufb01"
        assert json.loads(answer.calls[0].arguments)["city"] == "Zu\u0308"


def test_a_long_answer_is_read_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def parse(text: str, **more: Any) -> ParsedAnswer:
        threads.append(threading.current_thread())
        return ANSWER_FORMS["plain"].parse(text, **more)

    form: Any = SimpleNamespace(parse=parse)
    for length in (10, 100_000):
        answer = asyncio.run(
            read_answer(form, "a" * length, thinking=False, tools=True, schemas={})
        )
        assert len(answer.content) == length
    assert [thread is threading.current_thread() for thread in threads] == [True, False]


# ---- the choice ----------------------------------------------------------------------------------


def test_each_family_has_a_form_ours_where_one_fits() -> None:
    assert {f for f in FAMILIES if not form_of_family(f)} == {"gpt-oss"}
    assert {f for f in FAMILIES if form_of_family(f) in FAMILY_CALLS} == set(BY_PACKAGE)
    for family in OF_PACKAGE:
        name = shown_form("", renderer=family)
        assert form_of(family).name == name
        assert (name == f"renderers: {family}") == (family in BY_PACKAGE)
    assert shown_form("gemma4", renderer="template") == "renderers: gemma4"
    assert "chat template" in shown_form("", renderer="template")
    for template, name in (
        (KIMI, "renderers: kimi-k2"),
        ("{{ '<tool_call>' + arguments }}", "hermes"),
    ):
        assert shown_form("", renderer="template", template=template) == name
    assert shown_form("", renderer="template", template="{{ messages }}") == "plain"
    silent = shown_form("", renderer="template", template="{{ messages }}{{ tools }}")
    assert silent.startswith("plain: ")  # which says that calls stay text


KIMI = (
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' }}"
)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (KIMI, "kimi-k2"),
        ("{{ '<minimax:tool_call>\\n<invoke name=' }}", "minimax-m2"),
        ("{{ '<|tool_call>call:' + name }}{{ '<tool_call|>' }}", "gemma4"),
        ("{{ name + '<|content_invoke_tool_json|>' }}", "inkling"),
        ("{{ '<tool_call:opensource>' + name + '<tool_sep:opensource>' }}", "hy3"),
        ("{{ '<tool_sep{}>'.format(kind) }}{% set kind = ':opensource' %}", "hy3"),
        ("{{ '<|im_start|>' + role }}", ""),
    ],
)
def test_a_template_tells_the_family(template: str, family: str) -> None:
    assert family_of_template(template) == family
    tokenizer = OF_PACKAGE[family or "qwen3"].tokenizer
    form = choose_form("", tokenizer, renderer="template", template=template)
    assert form.name == (f"renderers: {family}" if family else "plain")


def test_a_form_of_ours_comes_first_and_a_name_before_all() -> None:
    tokenizer = OF_PACKAGE["kimi-k2"].tokenizer
    hermes = "{{ '<tool_call>' + arguments }}"
    both = choose_form("", tokenizer, renderer="template", template=KIMI + hermes)
    assert both.name == "hermes"
    named = choose_form("kimi-k2", tokenizer, renderer="template", template=hermes)
    assert named.name == "renderers: kimi-k2"
    ours = choose_form("plain", tokenizer, renderer="kimi-k2", template=KIMI)
    assert ours.name == "plain"


def test_without_the_package_a_template_is_read_as_ever_and_a_name_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    tokenizer = OF_PACKAGE["kimi-k2"].tokenizer
    form = choose_form("", tokenizer, renderer="template", template=KIMI)
    assert form.name == "plain"
    assert "kimi-k2" in caplog.text
    with pytest.raises(ConfigError):
        choose_form("kimi-k2", tokenizer, renderer="template", template=KIMI)


def test_a_tokenizer_without_the_marks_is_read_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = OF_PACKAGE["llama-3"].tokenizer
    assert choose_form("", tokenizer, renderer="template", template=KIMI).name == "plain"
    assert form_choice.__name__ in {record.name for record in caplog.records}


def test_a_plan_takes_forms_and_families_and_nothing_else() -> None:
    for name in ("", *FORM_NAMES):
        assert not list(argument_problems("agent", "chat", {"form": name}, where="x"))
    (problem,) = argument_problems("agent", "chat", {"form": "kimi-k3"}, where="task.agent_args")
    assert problem.where.endswith("task.agent_args.form")
    assert needed_by_form("kimi-k2") == PACKAGES
    assert needed_by_form("hermes") == ()
    workers: Any = [
        SimpleNamespace(env="math_verify", agent_args={"form": name}) for name in ("glm", "hy3")
    ]
    assert packages_of_rollouts(workers) == [*PACKAGES]
    assert packages_of_rollouts(workers[:1]) == []


def test_a_plan_tells_the_form_that_reads(tmp_path: Path) -> None:
    assert answer_form("math_single_step", {}, "") == ""
    assert answer_form("chat", {"renderer": "hy3"}, "") == "renderers: hy3"
    assert answer_form("external", {"form": "glm"}, str(tmp_path)) == "glm"
    (tmp_path / "chat_template.jinja").write_text(KIMI)
    assert answer_form("chat", {}, str(tmp_path)) == "renderers: kimi-k2"
    config: Any = SimpleNamespace(
        rollout_worker=[SimpleNamespace(agent="chat", agent_args={}, tokenizer_path=str(tmp_path))]
    )
    (line,) = answer_form_lines(config)
    assert "renderers: kimi-k2" in line
