"""Turns of templates of each kind: contexts as sampled from, targets with the mark that ends them."""

from __future__ import annotations

from typing import Any

import pytest

from realsys.api.errors import DataError
from realsys.data.sources.assistant_turns import TurnReader, any_of
from realsys.models.render_template import environment

MARKS = ("<s>", "</s>", "<u>", "<a>", "<t>", "<end>", "<call>", "</call>", "[I]", "[/I]", "<now>")
CALL = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
# Turns that end in a mark and a line break, calls behind the content.
PLAIN = (
    "{% for m in messages %}<{{ {'user': 'u', 'assistant': 'a', 'tool': 't'}[m.role] }}>{{ m.content }}"
    + CALL
    + "<end>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# Thoughts of the last turn alone; an answer opens one.
THINKS = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<end>{% else %}<a>"
    "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
# The same, and thoughts are never written.
NEVER = THINKS.replace("loop.last and m.reasoning_content", "false")
# A turn ends where the next one begins.
NEXT_ROLE = (
    "{% for m in messages %}<{{ {'user': 'u', 'assistant': 'a', 'tool': 't'}[m.role] }}>{{ m.content }}"
    + CALL
    + "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# The mark that ends a turn comes with the next message.
LATE_END = (
    "{% for m in messages %}{% if not loop.first %}<end>{% endif %}<{{ m.role[0] }}>{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<end><a>{% endif %}"
)
# The system's text stands in the last message if that is the user's; nothing opens an answer.
MOVED = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[I]"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}[/I]{% elif m.role == 'assistant' %}{{ m.content }}"
    + CALL
    + "</s>{% endif %}{% endfor %}"
)
# What stands behind a result depends on whether it is answered.
REOPENED = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<end>\n"
    "{% elif m.role == 'tool' %}<t>{{ m.content }}{{ '<end>\n' if loop.last }}"
    "{% else %}<a>{{ m.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<a>{% endif %}"
)
# The opening of an answer stands behind a result only once that is answered.
OPENS_LATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<t>{{ m.content }}"
    "{% else %}<{{ m.role[0] }}>\n{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<a>\n{% endif %}"
)
# Content beside calls stands behind their results, and the opening behind it only once it is answered.
BESIDE = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<end>\n"
    "{% elif m.role == 'assistant' %}<a>\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>{% endif %}"
    + CALL
    + "{% if not m.tool_calls %}{{ m.content }}<end>\n{% endif %}"
    "{% else %}<t>{{ m.content }}</t>{{ messages[loop.index0 - 1].content }}"
    "{{ '<end>\n' if loop.last }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<a>\n{% endif %}"
)
# The end of the text stands behind the end of the last turn.
TEXT_END = PLAIN.replace(
    "{% endfor %}{% if add",
    "{% endfor %}{% if not add_generation_prompt %}</s>{% endif %}{% if add",
)
# Calls end otherwise than answers do.
CALLS_END = PLAIN.replace("<end>\n", "{{ '<now>' if m.tool_calls else '<end>' }}\n")


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(content: str = "") -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 1}}
    return said("assistant", content, tool_calls=[{"id": "c1", "function": function}])


SYSTEM, ASKED, AGAIN = said("system", "S"), said("user", "Q"), said("user", "Q2")
ONE, TWO = said("assistant", "A"), said("assistant", "B")
RESULT = said("tool", "R", tool_call_id="c1", name="add")


def thought(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        **answer,
        "reasoning_content": f"T{answer['content']}",
        "thinking": f"T{answer['content']}",
    }


def turns(template: str, *messages: dict[str, Any]) -> list[tuple[str, str]]:
    """Context and target of each turn."""
    compiled = environment().from_string(template)

    def render(given: Any, opens: bool) -> str:
        try:
            return str(compiled.render(messages=given, add_generation_prompt=opens))
        except Exception as error:
            raise DataError(str(error), where="template", fix="") from error

    reader = TurnReader(render, marks=any_of(MARKS), last_mark="</s>")
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [(turn.context, turn.target) for turn in (reader.read(messages, i) for i in places)]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            PLAIN,
            (ASKED, ONE, AGAIN, TWO),
            [("<u>Q<end>\n<a>", "A<end>"), ("<u>Q<end>\n<a>A<end>\n<u>Q2<end>\n<a>", "B<end>")],
        ),
        (
            PLAIN,
            (ASKED, called("A"), RESULT, TWO),
            [
                ("<u>Q<end>\n<a>", 'A<call>add{"a": 1}</call><end>'),
                ('<u>Q<end>\n<a>A<call>add{"a": 1}</call><end>\n<t>R<end>\n<a>', "B<end>"),
            ],
        ),
        (PLAIN, (ASKED, said("assistant", "")), [("<u>Q<end>\n<a>", "<end>")]),
        (PLAIN, (ASKED, said("assistant", " A<end> \n")), [("<u>Q<end>\n<a>", " A<end> \n<end>")]),
        (
            THINKS,
            (ASKED, thought(ONE), AGAIN, thought(TWO)),
            [
                ("<u>Q<end><a><think>\n", "TA\n</think>\n\nA<end>"),
                ("<u>Q<end><a>A<end><u>Q2<end><a><think>\n", "TB\n</think>\n\nB<end>"),
            ],
        ),
        (THINKS, (ASKED, ONE), [("<u>Q<end><a><think>\n", "\n</think>\n\nA<end>")]),
        (NEVER, (ASKED, thought(ONE)), [("<u>Q<end><a><think>\n", "TA\n</think>\n\nA<end>")]),
        (NEVER, (ASKED, ONE), [("<u>Q<end><a><think>\n", "\n</think>\n\nA<end>")]),
        (
            NEXT_ROLE,
            (ASKED, called(), RESULT, TWO),
            [
                ("<u>Q<a>", '<call>add{"a": 1}</call><t>'),
                ('<u>Q<a><call>add{"a": 1}</call><t>R<a>', "B<u>"),
            ],
        ),
        (
            LATE_END,
            (ASKED, ONE, AGAIN, TWO),
            [("<u>Q<end><a>", "A<end>"), ("<u>Q<end><a>A<end><u>Q2<end><a>", "B<end>")],
        ),
        (
            MOVED,
            (SYSTEM, ASKED, ONE, AGAIN, called()),
            [
                ("<s>[I]S\nQ[/I]", "A</s>"),
                ("<s>[I]Q[/I]A</s>[I]S\nQ2[/I]", '<call>add{"a": 1}</call></s>'),
            ],
        ),
        (
            REOPENED,
            (ASKED, ONE, RESULT, TWO),
            [("<u>Q<end>\n<a>", "A<end>"), ("<u>Q<end>\n<a>A<end>\n<t>R<end>\n", "B<end>")],
        ),
        (
            TEXT_END,
            (ASKED, ONE, AGAIN, TWO),
            [("<u>Q<end>\n<a>", "A<end>"), ("<u>Q<end>\n<a>A<end>\n<u>Q2<end>\n<a>", "B<end>")],
        ),
        (
            CALLS_END,
            (ASKED, called(), RESULT, TWO),
            [
                ("<u>Q<end>\n<a>", '<call>add{"a": 1}</call><now>'),
                ('<u>Q<end>\n<a><call>add{"a": 1}</call><now>\n<t>R<end>\n<a>', "B<end>"),
            ],
        ),
        (
            OPENS_LATE,
            (ASKED, ONE, RESULT, TWO),
            [
                ("<u>\nQ<end><a>\n", "A<end>"),
                ("<u>\nQ<end><a>\nA<end><t>R", "B<end>"),
            ],
        ),
        (
            BESIDE,
            (ASKED, called("A"), RESULT, thought(TWO)),
            [
                ("<u>Q<end>\n<a>\n", '<call>add{"a": 1}</call><end>'),
                (
                    '<u>Q<end>\n<a>\n<call>add{"a": 1}</call><t>R</t>A<end>\n',
                    "<think>\nTB\n</think>B<end>",
                ),
            ],
        ),
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            (ASKED, ONE),
            [("Q\n", "A</s>")],
        ),
    ],
)
def test_a_turn_is_what_sampling_sees_and_has_to_say(template, messages, expected):
    assert turns(template, *messages) == expected


def reader(template: str) -> TurnReader:
    compiled = environment().from_string(template)
    return TurnReader(
        lambda given, opens: compiled.render(messages=given, add_generation_prompt=opens),
        marks=any_of((*MARKS, "\n", "\n\n")),
        last_mark="</s>",
    )


@pytest.mark.parametrize(
    ("template", "mark"),
    [(PLAIN, "<end>"), (MOVED, "</s>"), (NEXT_ROLE, "<t>"), (THINKS, ""), (LATE_END, "")],
)
def test_calls_end_in_a_mark_of_their_own(template, mark):
    asked = [{"role": "user", "content": "?"}]
    assert reader(template).end_mark_of_calls(asked, "f") == mark


def test_what_a_template_leaves_out_is_named():
    without = reader(PLAIN.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"))
    turn = without.read([ASKED, thought(called("A"))], 1)
    assert turn.target == '<call>add{"a": 1}</call><end>'
    assert (turn.left_out, turn.is_whole) == (("content", "reasoning_content"), True)
    assert without.read([ASKED, ONE], 1).left_out == ()


def test_a_turn_whose_calls_or_words_are_left_out_is_not_whole():
    two = {**called("A"), "tool_calls": [*called()["tool_calls"] * 2]}
    for template in (
        PLAIN.replace(CALL, ""),
        PLAIN.replace(CALL, CALL.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")),
    ):
        turn = reader(template).read([ASKED, two], 1)
        assert (turn.left_out, turn.is_whole) == (("tool_calls",), False)
    empty = PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}")
    assert not reader(empty).read([ASKED, ONE], 1).is_whole
    assert reader(empty).read([ASKED, said("assistant", "")], 1).is_whole
    silent = "{% for m in messages if m.role == 'user' %}?{% endfor %}{{ messages | length }}"
    assert not reader(silent).read([ASKED, ONE], 1).is_whole


@pytest.mark.parametrize("odd", [True, ["x"], {"text": "x"}, 3])
def test_thoughts_that_are_no_text_are_none(odd):
    answer = {**ONE, "thinking": odd, "reasoning_content": odd}
    assert reader(THINKS.replace("loop.last and ", "false and ")).read(
        [ASKED, answer], 1
    ).target == ("\n</think>\n\nA<end>")


def test_thoughts_that_a_content_begins_with_stay_where_a_template_takes_them_off():
    answer = said("assistant", "<think>\nT\n</think>\n\nA")
    takes_off = NEVER.replace(
        "{{ m.content }}<end>{% endif %}", "{{ m.content.split('</think>')[-1] }}<end>{% endif %}"
    )
    turn = reader(takes_off).read([ASKED, answer], 1)
    assert (turn.target, turn.left_out) == ("\nT\n\n</think>\n\nA<end>", ())


def test_a_long_conversation_is_rendered_twice_a_turn():
    compiled, lengths = environment().from_string(PLAIN), []

    def render(given: Any, opens: bool) -> str:
        lengths.append(len(given))
        return str(compiled.render(messages=given, add_generation_prompt=opens))

    turns = TurnReader(render, marks=any_of(MARKS), last_mark="</s>")
    chat = [ASKED, ONE] * 20
    for place in range(1, 40, 2):
        turns.read(chat, place)
    assert sum(length > 3 for length in lengths) <= 40
