"""The package ``renderers`` behind our protocol: equal to a family's template where both know it, and what
was sampled stays as it is, whatever the package returns.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import golden
import pytest
from fuzzed_history import FuzzedHistory
from package_families import OF_PACKAGE, OF_TEMPLATES

from realsys.api.errors import ConfigError, DataError
from realsys.config import extras
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.conversation.chat_rendering import RenderedChat, TemplateRenderer
from realsys.rollout.conversation.package_renderer import FAMILIES, PackageRenderer

TOOLS = ({"type": "function", "function": {"name": "search", "parameters": {}}},)
# Where the text begins that the test's template and the family's own have in common: behind the system's.
FIRST_TURN = {
    "qwen3": "<|im_start|>user",
    "llama-3": "<|start_header_id|>user",
    "deepseek-r1": "<｜User｜>",
}


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def said(content: str, *, reasoning: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=content, reasoning=reasoning)


def called(*ids: str, content: str = "") -> ChatMessage:
    calls = tuple(ToolCall(id=i, name="search", arguments='{"q": "ü", "n": 2}') for i in ids)
    return ChatMessage(role="assistant", content=content, tool_calls=calls)


def result(id_: str, content: str) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=id_)


def renderer(family: str, **more: Any) -> PackageRenderer:
    return PackageRenderer(OF_PACKAGE[family].tokenizer, family, **more)


def text_of(made: PackageRenderer | TemplateRenderer, rendered: RenderedChat | None) -> str:
    assert rendered is not None
    return str(made.tokenizer.decode(rendered.tokens))


def behind(
    made: PackageRenderer | TemplateRenderer,
    messages: Sequence[ChatMessage],
    answered: int,
    answer: str,
    tools: Any = (),
) -> RenderedChat | None:
    """What ``made`` writes behind ``answer``, the text of the last of ``messages[:answered]``."""
    prompt = made.whole(messages[: answered - 1], tools).tokens
    return made.behind(
        messages, answered, tools, prompt=prompt, sampled=made.tokenizer.encode(answer)
    )


def test_the_families_are_those_of_the_package() -> None:
    from renderers import configs

    known = set(configs._CONFIG_BY_NAME) - {"auto", "default"}
    assert set(FAMILIES) == known
    assert set(OF_PACKAGE) == known - {"gpt-oss"}  # it gets its vocabulary from the network


TEXTS = ("What is 3 + 4?\nSay so.", "x = 3", "日本語 😀", '{"a": 1}', "the weather in Paris")


def _history(rng: random.Random, *, calls: bool) -> list[ChatMessage]:
    made = [user(rng.choice(TEXTS))]
    for turn in range(rng.randrange(4)):
        ids = [f"abcdefg{turn}{i}" for i in range(rng.choice((0, 0, 1, 2)) if calls else 0)]
        thoughts = rng.choice(("", "because"))
        made.append(replace(called(*ids, content=rng.choice(TEXTS)), reasoning=thoughts))
        made += [result(i, rng.choice(TEXTS)) for i in ids] or [user(rng.choice(TEXTS))]
    return made


def _from_first_turn(
    made: PackageRenderer | TemplateRenderer, rendered: RenderedChat, mark: str
) -> tuple[int, ...]:
    text = text_of(made, rendered)
    return rendered.tokens[len(made.tokenizer.encode(text[: text.index(mark)])) :]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "llama-3", "deepseek-r1"])
def test_a_conversation_has_the_tokens_of_the_familys_template(family: str) -> None:
    of, mark = OF_TEMPLATES[family], FIRST_TURN[family]
    ours, theirs = TemplateRenderer(of.tokenizer, end_ids=of.end_ids), renderer(family)
    rng = random.Random(0)
    for _ in range(100):
        # The test's own templates write calls as the family's does for Qwen3 alone
        messages = _history(rng, calls=family == "qwen3")
        a, b = ours.whole(messages, ()), theirs.whole(messages, ())
        assert _from_first_turn(ours, a, mark) == _from_first_turn(theirs, b, mark)
        assert a.thinking == b.thinking
        answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
        if answers:
            answer = ("x</think>\n\nok" if b.thinking else "ok") + of.ends[0]
            args = messages, answers[-1] + 1, answer
            assert behind(ours, *args) == behind(theirs, *args)


def test_tools_and_their_results_are_the_familys() -> None:
    messages = [user("?"), called("a", "b", content="so"), result("a", "1"), result("b", "2")]
    made = renderer("qwen3")
    text = text_of(made, made.whole(messages, TOOLS))
    assert '{"name": "search", "arguments": {"q": "ü", "n": 2}}\n</tool_call>' in text
    assert '"function": {"name": "search"' in text.partition("<|im_end|>")[0]
    rest = behind(made, messages, 2, "so<tool_call>{}</tool_call><|im_end|>", TOOLS)
    assert text_of(made, rest) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_result_has_its_tools_name_from_the_call() -> None:
    messages = [user("?"), called("a"), result("a", "1")]
    for tools in ((), TOOLS):
        made = renderer("kimi-k2")
        whole = text_of(made, made.whole(messages, tools))
        assert "<|im_system|>search<|im_middle|>" in whole
        rest = text_of(made, behind(made, messages, 2, "x<|im_end|>", tools))
        assert "<|im_system|>search<|im_middle|>" in rest


def test_kimis_ids_have_the_tools_name() -> None:
    first, second = called("a", "b"), called("c")
    messages = [user("?"), first, result("b", "2"), result("a", "1"), second, result("c", "3")]
    for family in ("kimi-k2", "kimi-k2.5"):
        made = renderer(family)
        whole = text_of(made, made.whole(messages, TOOLS))
        written = re.findall(r"call_begin\|>(\S+?)<|Return of (\S+)", whole)
        ids = [f"functions.search:{number}" for number in (0, 1, 1, 0, 2, 2)]
        assert [call or of for call, of in written] == ids
        rest = text_of(made, behind(made, messages[:3], 2, "x</think>y<|im_end|>", TOOLS))
        assert "Return of functions.search:1\n" in rest


def test_a_developers_message_is_the_systems() -> None:
    made = renderer("qwen3")
    given = ChatMessage(role="developer", content="be brief")
    as_system = replace(given, role="system")
    assert made.whole([given, user("?")], ()) == made.whole([as_system, user("?")], ())


def test_an_answer_that_was_cut_off_gets_its_end() -> None:
    made = renderer("qwen3")
    messages = [user("1"), said("one"), user("2")]
    ended = text_of(made, behind(made, messages, 2, "one<|im_end|>"))
    assert text_of(made, behind(made, messages, 2, "one")) == "<|im_end|>" + ended
    in_thoughts = text_of(made, behind(made, messages, 2, "<think>\none"))
    assert in_thoughts == "</think><|im_end|>" + ended


def test_thoughts_that_never_end_begin_a_branch() -> None:
    made = renderer("qwen3")
    messages = [user("1"), said("one"), user("2")]
    assert behind(made, messages, 2, "<think>\none<|im_end|>") is None


def test_thoughts_stay_or_the_next_question_begins_a_branch() -> None:
    messages = [user("1"), said("one", reasoning="because"), user("2")]
    answer = "<think>\nbecause\n</think>\n\none<|im_end|>"
    assert behind(renderer("qwen3"), messages, 2, answer) is not None
    dropping = renderer("qwen3", keep_thoughts=False)
    assert behind(dropping, messages, 2, answer) is None
    assert "because" not in text_of(dropping, dropping.whole(messages, ()))
    looped = [user("1"), called("a"), result("a", "1")]
    assert behind(dropping, looped, 2, answer) is not None


def test_an_answer_that_a_client_wrote_begins_a_branch() -> None:
    messages = [user("1"), said("one"), user("2"), said("not of the policy"), user("3")]
    assert behind(renderer("qwen3"), messages, 2, "one<|im_end|>") is None


def test_thoughts_that_the_prompt_opens_are_told() -> None:
    assert renderer("deepseek-r1").whole([user("1")], ()).thinking
    assert not renderer("qwen3").whole([user("1")], ()).thinking
    assert renderer("qwen3.5").whole([user("1")], ()).thinking
    no_thoughts = renderer("qwen3.5", template_args={"enable_thinking": False})
    assert not no_thoughts.whole([user("1")], ()).thinking


# ---- what the package may not do -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("extended", "more"),
    [
        ([1, 2, 3, 4, 9, 9], (9, 9)),
        ([1, 2, 3, 4], None),  # nothing that asks the policy to answer
        ([1, 2, 3], None),  # cut at the end of an earlier turn
        ([1, 2, 3, 9, 9], None),  # the last token is another
        ([1, 2, 7, 4, 9, 9], None),  # tokenised anew
        ([7, 2, 3, 4, 9, 9], None),  # in the prompt, too
        (None, None),
    ],
)
def test_only_what_stands_behind_the_same_tokens_counts(
    monkeypatch: pytest.MonkeyPatch, extended: list[int] | None, more: tuple[int, ...] | None
) -> None:
    made = renderer("qwen3")
    returned = None if extended is None else SimpleNamespace(token_ids=extended)
    monkeypatch.setattr(made._package, "bridge_to_next_turn", lambda *_, **__: returned)
    messages = [user("1"), said("one"), user("2")]
    rendered = made.behind(messages, 2, (), prompt=[1, 2], sampled=[3, 4])
    assert (rendered and rendered.tokens) == more


def test_an_end_token_within_an_answer_begins_a_branch() -> None:
    made = renderer("qwen3")
    messages = [user("1"), said("one"), user("2")]
    assert behind(made, messages, 2, "one<|im_end|>two") is None


def test_what_the_family_refuses_is_the_clients_mistake() -> None:
    with golden.raises(DataError):
        renderer("llama-3").whole([user("?"), called("a", "b")], ())
    with golden.raises(DataError):
        renderer("qwen3").whole([user("\ud83d")], ())


@pytest.mark.thorough
@pytest.mark.parametrize("family", list(OF_PACKAGE))
def test_what_is_trained_on_is_what_was_sampled(family: str) -> None:
    counts: Counter[str] = Counter()

    async def play() -> None:
        for seed in range(25):
            history = FuzzedHistory(OF_PACKAGE[family], seed, renderer=family)
            await asyncio.wait_for(history.run(), 60)
            assert history.problems == []
            counts.update(history.counts)
            nodes = history.session.tree.nodes
            counts["went on"] += sum(n.parent is not None for n in nodes)

    asyncio.run(play())
    assert counts["retokenised"] == 0
    assert counts["trained"] > 300
    assert counts["went on"] > 10


# ---- what is not there ---------------------------------------------------------------------------


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with golden.raises(ConfigError):
        renderer("qwen3")


@pytest.mark.parametrize(
    ("family", "args"),
    [
        ("qwen3.5", {}),
        ("llama-3", {"enable_thinking": False}),
    ],
)
def test_a_family_of_another_model_is_refused(family: str, args: dict[str, Any]) -> None:
    with golden.raises(ConfigError):
        PackageRenderer(OF_PACKAGE["llama-3"].tokenizer, family, template_args=args)
