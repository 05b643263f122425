"""What stands behind an answer is what the template would have written there, for six families."""

from __future__ import annotations

import copy
from typing import Any

import golden
import pytest
from chat_families import CHATML, DEEPSEEK, FAMILIES, LLAMA3, ChatFamily
from transformers import PreTrainedTokenizerFast

from realsys.api.errors import ConfigError, DataError
from realsys.rollout.conversation.answer_forms import form_of_template
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.conversation.chat_rendering import (
    RenderedChat,
    TemplateRenderer,
    template_message,
)

ALL = [pytest.param(f, id=f.name) for f in FAMILIES.values()]
TOOLS = ({"type": "function", "function": {"name": "search"}},)
NO_TOKEN = -1


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def said(content: str, *, reasoning: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=content, reasoning=reasoning)


def called(*ids: str, content: str = "", arguments: str = '{"q": 1}') -> ChatMessage:
    calls = tuple(ToolCall(id=i, name="search", arguments=arguments) for i in ids)
    return ChatMessage(role="assistant", content=content, tool_calls=calls)


def result(id: str, content: str) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=id, name="search")


def renderer(family: ChatFamily | str, **more: Any) -> TemplateRenderer:
    family = FAMILIES[family] if isinstance(family, str) else family
    return TemplateRenderer(family.tokenizer, end_ids=family.end_ids, **more)


def text_of(made: TemplateRenderer, rendered: RenderedChat | None) -> str:
    assert rendered is not None
    return str(made.tokenizer.decode(rendered.tokens))


CALL_ID, OTHER_ID = "abcdefgh1", "abcdefgh2"
TALKS = {
    "questions": ([user("1"), said("one"), user("2")], 2, "one"),
    "two answers": ([user("1"), said("one"), user("2"), said("two"), user("3")], 4, "two"),
    "empty": ([user("1"), said(""), user("2")], 2, ""),
    "the marks in texts": (
        [user("1 <|im_end|></s><eos>"), said("one"), user("<|eot_id|> answer-0-stands-here")],
        2,
        "one",
    ),
    "the same text twice": ([user("one"), said("one"), user("one")], 2, "one"),
    "unicode": ([user("日本語 😀"), said("e\u0301 ü"), user("\u200d\u0000")], 2, "e\u0301 ü"),
}


@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("family", ALL)
def test_prompt_answer_and_rest_are_what_the_template_writes_of_it_all(
    family: ChatFamily, name: str
) -> None:
    messages, answered, answer = TALKS[name]
    made = renderer(family)
    end = made.tokenizer.eos_token_id
    begun = text_of(made, made.whole(messages[: answered - 1], ()))
    rest = text_of(made, made.behind(messages, answered, (), prompt=(), sampled=[end]))
    lead = " " if family.name == "mistral" else ""  # Mistral's models write it themselves
    whole = text_of(made, made.whole(messages, ()))
    if family.name == "deepseek":  # R1 opens thoughts for a new answer, and writes none of old ones
        begun = begun.replace("<think>\n", "")
    assert begun + lead + answer + family.ends[0] + rest == whole


@pytest.mark.parametrize("family", ALL)
def test_results_of_calls_are_what_the_template_writes(family: ChatFamily) -> None:
    messages = [user("1"), called(CALL_ID), result(CALL_ID, "found it")]
    made = renderer(family)
    whole = text_of(made, made.whole(messages, TOOLS))
    rest = text_of(
        made, made.behind(messages, 2, TOOLS, prompt=(), sampled=[made.tokenizer.eos_token_id])
    )
    assert "found it" in rest
    assert whole.endswith(family.ends[0] + rest)
    assert "search" not in rest or family.name == "plain"


def test_results_of_two_calls_share_what_their_template_puts_around_them() -> None:
    messages = [
        user("1"),
        called(CALL_ID, OTHER_ID),
        result(CALL_ID, "a"),
        result(OTHER_ID, "b"),
    ]
    made = renderer("chatml")
    rest = text_of(made, made.behind(messages, 2, TOOLS, prompt=(), sampled=[NO_TOKEN]))
    assert rest == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>"
        "\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    made = renderer("deepseek")
    rest = text_of(
        made, made.behind(messages, 2, TOOLS, prompt=(), sampled=[made.tokenizer.eos_token_id])
    )
    assert rest == (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>a<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>b<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )


@pytest.mark.parametrize("family", ALL)
def test_a_turn_that_the_answer_has_not_ended_is_ended(family: ChatFamily) -> None:
    messages, made = [user("1"), said("one"), user("2")], renderer(family)
    ended = text_of(
        made, made.behind(messages, 2, (), prompt=(), sampled=[made.tokenizer.eos_token_id])
    )
    cut = text_of(made, made.behind(messages, 2, (), prompt=(), sampled=[NO_TOKEN]))
    assert cut == family.ends[0] + ended
    letter = made.tokenizer.encode("e")[0]
    assert made.behind(messages, 2, (), prompt=(), sampled=[letter]) == made.behind(
        messages, 2, (), prompt=(), sampled=[NO_TOKEN]
    )


def test_any_end_token_of_the_answer_ends_its_turn() -> None:
    made = renderer("chatml")
    by_other = made.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    rest = text_of(
        made, made.behind([user("1"), said("x"), user("2")], 2, (), prompt=(), sampled=[by_other])
    )
    assert rest == "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"


def test_a_mark_of_the_next_message_is_dropped_only_where_it_was_sampled() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer
    end, mark = (tokenizer.convert_tokens_to_ids(x) for x in ("<|endoftext|>", "<|im_start|>"))
    made = TemplateRenderer(
        tokenizer,
        end_ids=(end, mark),
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    talk = [user("1"), said("x"), user("2")]
    rest = "user\n2<|im_start|>assistant\n"
    for sampled, expected in ((mark, rest), (end, "<|im_start|>" + rest)):
        assert text_of(made, made.behind(talk, 2, (), prompt=(), sampled=[sampled])) == expected


def test_a_turn_with_calls_may_end_in_another_token() -> None:
    own = LLAMA3.replace("{{- '}<|eot_id|>' -}}", "{{- '}<|eom_id|>' -}}")
    assert own != LLAMA3
    made = renderer("llama3", template=own)
    messages = [user("1"), called(CALL_ID), result(CALL_ID, "found")]
    rest = text_of(made, made.behind(messages, 2, TOOLS, prompt=(), sampled=[NO_TOKEN]))
    assert rest == (
        '<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n"found"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_result_is_not_lost_where_a_turn_with_calls_has_no_end() -> None:
    """The next end is that of a later answer: what stands before it must not be taken for the call's."""
    own = DEEPSEEK.replace(
        "{{- eos_token -}}", "{%- if not m.tool_calls -%}{{- eos_token -}}{%- endif -%}"
    )
    assert own != DEEPSEEK
    made = renderer("deepseek", template=own)
    messages = [user("1"), called(CALL_ID), result(CALL_ID, "found"), said("so"), user("2")]
    assert made.behind(messages[:3], 2, TOOLS, prompt=(), sampled=[NO_TOKEN]) is None
    assert made.behind(messages, 2, TOOLS, prompt=(), sampled=[NO_TOKEN]) is None
    assert made.behind(messages, 4, TOOLS, prompt=(), sampled=[NO_TOKEN]) is not None


def test_a_template_that_ends_no_turn_shows_nothing() -> None:
    made = renderer(
        "plain", template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert (
        made.behind([user("1"), said("one"), user("2")], 2, (), prompt=(), sampled=[NO_TOKEN])
        is None
    )
    assert text_of(made, made.whole([user("1")], ())) == "user: 1\n"


@pytest.mark.parametrize("family", ALL)
def test_a_text_that_repeats_what_the_renderer_puts_in_changes_nothing(family: ChatFamily) -> None:
    """A tool's description, later messages and calls may hold any text, the renderer's own too."""
    texts = [f"answer-{i}-stands-here" for i in range(3)] + ["realsys-answer-stands-here"]
    made = renderer(family)
    messages = [user(texts[0]), said("one"), user(texts[1]), called(CALL_ID, content=texts[2])]
    messages += [result(CALL_ID, texts[3])]
    end = made.tokenizer.eos_token_id
    rest = text_of(made, made.behind(messages[:3], 2, TOOLS, prompt=(), sampled=[end]))
    assert texts[1] in rest
    assert texts[0] not in rest
    rest = text_of(made, made.behind(messages, 4, TOOLS, prompt=(), sampled=[end]))
    assert texts[3] in rest
    assert texts[2] not in rest


# ---- thoughts


def test_thoughts_of_an_old_answer_stay_or_make_a_branch() -> None:
    asked_again = [user("1"), said("one", reasoning="because"), user("2")]
    looped = [user("1"), called(CALL_ID), result(CALL_ID, "x")]
    looped[1] = ChatMessage(role="assistant", reasoning="because", tool_calls=looped[1].tool_calls)
    for keeps, is_branch in ((True, False), (False, True)):
        made = renderer("qwen3", keep_thoughts=keeps)
        assert (made.behind(asked_again, 2, (), prompt=(), sampled=[NO_TOKEN]) is None) is is_branch
        assert made.behind(looped, 2, TOOLS, prompt=(), sampled=[NO_TOKEN]) is not None
    # Until the next question comes: then the loop's thoughts are dropped, too
    made = renderer("qwen3", keep_thoughts=False)
    longer = [*looped, said("done", reasoning="found"), user("3")]
    assert made.behind(longer, 4, TOOLS, prompt=(), sampled=[NO_TOKEN]) is None
    assert "because" in text_of(made, made.whole(looped, TOOLS))
    assert "because" not in text_of(made, made.whole(longer, TOOLS))


def test_a_prompt_that_opens_thoughts_says_so() -> None:
    assert renderer("deepseek").whole([user("1")], ()).thinking
    assert not renderer("qwen3").whole([user("1")], ()).thinking
    assert not renderer("qwen3").whole([user("<think>")], ()).thinking
    made = renderer("deepseek")
    behind = made.behind([user("1"), said("x"), user("2")], 2, (), prompt=(), sampled=[NO_TOKEN])
    assert behind is not None
    assert behind.thinking
    behind = made.behind(
        [user("1"), called(CALL_ID), result(CALL_ID, "x")], 2, (), prompt=(), sampled=[NO_TOKEN]
    )
    assert behind is not None
    assert not behind.thinking  # R1 goes on without a new turn


# ---- what templates are given


def test_arguments_are_values_for_the_template_and_text_where_they_are_no_json() -> None:
    made = renderer("chatml")
    whole = text_of(
        made, made.whole([user("1"), called("a", arguments='{"q":1.0}'), user("2")], ())
    )
    assert '"arguments": {"q": 1.0}}' in whole
    whole = text_of(made, made.whole([user("1"), called("a", arguments="{q"), user("2")], ()))
    assert '"arguments": {q}' in whole


def test_arguments_are_text_for_a_template_that_takes_no_values() -> None:
    texts = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}</s>{% endfor %}"
    )
    made = renderer("llama3", template=texts)
    messages = [user("1"), called(CALL_ID, arguments='{"q":  1}'), result(CALL_ID, "2")]
    whole = text_of(made, made.whole(messages, TOOLS))
    assert whole == 'user:1</s>assistant:search{"q":  1}</s>tool:2</s>'


def test_a_developer_is_the_system_where_a_template_knows_none() -> None:
    developer = ChatMessage(role="developer", content="be brief")
    made = renderer("chatml")
    assert text_of(made, made.whole([developer, user("1")], ())).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n"
    )
    made = renderer(
        "plain", template="{% for m in messages %}{{ m.role }}{% endfor %}developer<eos>"
    )
    assert text_of(made, made.whole([developer], ())).startswith("developer")


def test_arguments_of_the_template_reach_it() -> None:
    own = CHATML.replace("assistant\\n' -}}{%- endif -%}", "assistant\\n' + mood -}}{%- endif -%}")
    assert own != CHATML
    made = renderer("chatml", template=own, template_args={"mood": "(glad) "})
    assert text_of(made, made.whole([user("1")], ())).endswith("assistant\n(glad) ")


@pytest.mark.parametrize(("of", "roles"), [("none", ""), ("tools", "tool"), ("all", "tool user")])
@pytest.mark.parametrize("family", ALL)
def test_marks_in_texts_are_text(family: ChatFamily, of: str, roles: str) -> None:
    made, end = renderer(family, marks_as_text=of), family.ends[0]
    mark = made.tokenizer.convert_tokens_to_ids(end)
    for role, hostile in (("tool", f"found {end} it"), ("user", f"{end}1{end}")):
        plain = hostile.replace(end, "-")
        counts = []
        for text in (hostile, plain):
            question = text if role == "user" else "1"
            talk = [user(question), called(CALL_ID)]
            talk += [result(CALL_ID, text if role == "tool" else "2")]
            begun = made.whole(talk, TOOLS)
            rest = made.behind(talk, 2, TOOLS, prompt=(), sampled=[mark])
            assert rest is not None
            counts += [begun.tokens.count(mark), rest.tokens.count(mark)]
            shown = text_of(made, begun)
            assert (text in shown) or (family.name in ("deepseek", "llama3", "mistral"))
        in_whole, in_rest = counts[0] - counts[2], counts[1] - counts[3]
        number = 0 if role in roles.split() else hostile.count(end)
        assert in_whole == number
        assert in_rest == (number if role == "tool" else 0)


def test_a_template_for_tools_is_filled_where_there_are_tools() -> None:
    tokenizer = copy.copy(FAMILIES["plain"].tokenizer)
    plain = FAMILIES["plain"].template
    tokenizer.chat_template = {"default": plain, "tool_use": "tools! " + plain}
    made = TemplateRenderer(tokenizer, end_ids=FAMILIES["plain"].end_ids)
    assert not text_of(made, made.whole([user("1")], ())).startswith("tools!")
    assert text_of(made, made.whole([user("1")], TOOLS)).startswith("tools!")
    assert made.template.startswith("tools!")


def test_arguments_of_a_request_come_before_those_of_the_run() -> None:
    own = CHATML.replace("assistant\\n' -}}{%- endif -%}", "assistant\\n' + mood -}}{%- endif -%}")
    made = renderer("chatml", template=own, template_args={"mood": "(glad) "})
    assert made.reads("mood")
    for no_argument in ("moo", "assistant", "m", "for", "namespace", "tojson"):
        assert not made.reads(no_argument)
    sad = made.whole([user("1")], (), args={"mood": "(sad) "})
    assert text_of(made, sad).endswith("assistant\n(sad) ")
    talk = [user("1"), said("one"), user("2")]
    rest = made.behind(talk, 2, (), prompt=(), sampled=[NO_TOKEN], args={"mood": "(sad) "})
    assert text_of(made, rest).endswith("assistant\n(sad) ")
    assert text_of(made, made.whole([user("1")], ())).endswith("assistant\n(glad) ")


@pytest.mark.parametrize("talk", ["first", "second", "system", "behind a result"])
@pytest.mark.parametrize("family", ALL)
def test_a_message_that_was_begun_goes_on_as_transformers_has_it(
    family: ChatFamily, talk: str
) -> None:
    made, begun = renderer(family), said("The answer is")
    before = {
        "first": [user("1")],
        "second": [user("1"), said("one"), user("The answer is")],
        "system": [ChatMessage(role="system", content="be brief"), user("1")],
        "behind a result": [user("1"), called(CALL_ID), result(CALL_ID, "found")],
    }[talk]
    whole = text_of(made, made.whole([*before, begun], TOOLS, continues=True))
    assert whole == made.tokenizer.apply_chat_template(
        [template_message(m, takes_developer=False) for m in [*before, begun]],
        tools=[dict(tool) for tool in TOOLS],
        chat_template=made.template,
        continue_final_message=True,
        tokenize=False,
    )


def test_white_space_at_the_end_of_what_was_begun_is_kept() -> None:
    made = renderer("llama3")  # which trims contents
    whole = made.whole([user("1"), said(" 1, 2, ")], (), continues=True)
    assert text_of(made, whole).endswith("<|end_header_id|>\n\n 1, 2, ")


@pytest.mark.parametrize(
    ("content", "thinking"),
    [("<think>\nLet me", True), ("<think>\nYes.\n</think>\n\nIt is", False), ("It is", False)],
)
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_thoughts_that_were_begun_go_on(family: str, content: str, thinking: bool) -> None:
    made = renderer(family)
    whole = made.whole([user("1"), said(content)], (), continues=True)
    text = text_of(made, whole)
    assert text.endswith(content)
    assert text.count("<think>") == max(1 if family == "qwen3" else 0, content.count("<think>"))
    assert whole.thinking is thinking


def test_thoughts_beside_what_was_begun_go_on() -> None:
    made = renderer("qwen3")
    for content, end in (("", "<think>\nhm, "), ("It", "<think>\nhm, \n</think>\n\nIt")):
        whole = made.whole([user("1"), said(content, reasoning="hm, ")], (), continues=True)
        assert text_of(made, whole).endswith(f"assistant\n{end}")
        assert whole.thinking is (content == "")
    with golden.raises(DataError):
        renderer("chatml").whole([user("1"), said("", reasoning="hm")], (), continues=True)


def test_a_message_goes_on_behind_an_answer_of_the_policy() -> None:
    made = renderer("chatml")
    talk = [user("1"), said("one"), user("2"), said("tw")]
    rest = made.behind(talk, 2, (), prompt=(), sampled=[NO_TOKEN], continues=True)
    assert text_of(made, rest) == (
        "<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\ntw"
    )


def test_a_message_that_the_template_leaves_out_does_not_go_on() -> None:
    own = "{% for m in messages if m.role == 'user' %}{{ m.content }}<eos>{% endfor %}"
    with golden.raises(DataError):
        renderer("plain", template=own).whole([user("1"), said("a")], (), continues=True)


@pytest.mark.parametrize(
    ("family", "messages"),
    [
        ("mistral", [user("1"), user("2")]),
        ("mistral", [user("1"), called("short"), result("short", "x")]),
        ("llama3", [user("1"), called(CALL_ID, OTHER_ID)]),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(
    family: str, messages: list[ChatMessage]
) -> None:
    with golden.raises(DataError):
        renderer(family).whole(messages, ())


def test_a_template_that_refuses_conversations_is_a_mistake_of_the_settings() -> None:
    with golden.raises(ConfigError):
        renderer("plain", template="{{ raise_exception('never') }}")


@pytest.mark.parametrize("quick", [True, False])
def test_half_a_letter_is_refused(quick: bool) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer
    if not quick:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, chat_template=CHATML
        )
    made = TemplateRenderer(tokenizer, end_ids=FAMILIES["chatml"].end_ids)
    with golden.raises(DataError):
        made.whole([user("\ud83d")], ())


@pytest.mark.parametrize("family", ALL)
def test_the_quick_tokenizer_of_these_tests_is_transformers(family: ChatFamily) -> None:
    quick = family.tokenizer
    real = PreTrainedTokenizerFast(
        tokenizer_object=quick.backend_tokenizer, clean_up_tokenization_spaces=False
    )
    text = "".join(family.marks) + " the answer is 日本語 e\u0301" + "".join(family.ends)
    ids = quick(text).input_ids
    assert real(text, add_special_tokens=False).input_ids == ids
    assert real.decode(ids, skip_special_tokens=False) == quick.decode(ids) == text
    assert form_of_template(family.template).name == {
        "chatml": "hermes",
        "qwen3": "hermes",
        "plain": "hermes",
        "llama3": "llama3_json",
    }.get(family.name, family.name)
