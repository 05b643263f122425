"""One episode: what the policy is asked with, what the client gets, what is trained on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import golden
import pytest
from chat_families import CHATML
from fuzzed_history import TOOLS
from scripted_policy import END, scripted

from realsys.api.agent import Answer
from realsys.api.errors import DataError, RemoteError
from realsys.config import extras
from realsys.rollout.conversation import request_places
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ChatResult,
    FinishReason,
    ToolChoice,
)
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.full_context import ContextFull
from realsys.rollout.conversation.growing_answer import GrowingAnswer
from realsys.rollout.conversation.message_matching import MessageMatch
from realsys.rollout.conversation.pending_call import SessionOver
from realsys.rollout.conversation.session_settings import SchemaUse

HERMES_CALL = '<tool_call>\n{"name": "search", "arguments": {"q": 1.0}}\n</tool_call>'


async def ask(session: EpisodeSession, *messages: ChatMessage, **more: Any) -> ChatResult:
    async with session.call(ChatRequest(messages=messages, **more)) as live:
        result = await live.result()
        live.read()
    return result


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def run(episode: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(episode, 100))


def decoded(session: EpisodeSession, tokens: Sequence[int]) -> str:
    return session.settings.decode(tokens)


# ---- going on


def test_a_conversation_goes_on_behind_the_tokens_that_were_sampled() -> None:
    async def episode() -> None:
        session, policy = scripted(f"hello{END}", f"again{END}")
        first = await ask(session, user("1"))
        message = first.replies[0].message
        assert message == ChatMessage(role="assistant", content="hello")
        second = await ask(session, user("1"), message, user("2"))
        sampled = policy.tokens(f"hello{END}")
        assert len(sampled) == 6  # letters, where the tokenizer would merge
        begun = policy.contexts[0] + sampled
        assert policy.contexts[1][: len(begun)] == begun
        rest = policy.contexts[1][len(begun) :]
        assert decoded(session, rest) == "\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
        assert second.num_prompt_tokens == len(policy.contexts[1])
        assert second.num_cached == len(begun)
        (made,) = session.sequences(reward=1.0)
        again = policy.tokens(f"again{END}")
        assert made.tokens == policy.contexts[1] + again
        assert [t for t, p in zip(made.tokens, made.from_policy, strict=True) if p] == [
            *sampled,
            *again,
        ]
        assert session.figures() == {
            "calls": 2.0,
            "branches": 1.0,
            "unread_answers": 0.0,
            "unread_calls": 0.0,
        }

    run(episode())


def test_an_answer_that_was_cut_is_ended_and_goes_on() -> None:
    async def episode() -> None:
        session, policy = scripted("hel", f"lo{END}")
        first = await ask(session, user("1"), max_tokens=3)
        assert first.replies[0].finish is FinishReason.LENGTH
        assert policy.wishes[0]["limit"] == 3
        await ask(session, user("1"), first.replies[0].message, user("go on"))
        begun = policy.contexts[0] + policy.tokens("hel")
        assert policy.contexts[1][: len(begun)] == begun
        rest = decoded(session, policy.contexts[1][len(begun) :])
        assert rest.startswith("<|im_end|>\n<|im_start|>user\ngo on")
        (made,) = session.sequences(reward=1.0)
        assert not made.truncated
        assert sum(made.from_policy) == 3 + 3  # "hel"; "lo" and its end

    run(episode())


def test_what_was_begun_goes_on_and_is_one_message() -> None:
    async def episode() -> None:
        session, policy = scripted(f" four{END}", f"again{END}")
        begun = ChatMessage(role="assistant", content="It is")
        first = await ask(session, user("1"), begun, continues=True)
        assert decoded(session, policy.contexts[0]).endswith("<|im_start|>assistant\nIt is")
        assert first.replies[0].message.content == " four"
        message = replace(begun, content="It is four")
        await ask(session, user("1"), message, user("2"))
        sampled = policy.contexts[0] + policy.tokens(f" four{END}")
        assert policy.contexts[1][: len(sampled)] == sampled
        (made,) = session.sequences(reward=1.0)
        assert sum(made.from_policy) == len(" four again") - 1 + 2  # letters, and two ends

    run(episode())


def test_an_answer_that_was_cut_goes_on_with_its_own_tokens() -> None:
    async def episode() -> None:
        session, policy = scripted("hel", "lo", f" you{END}", f"yes{END}")
        first = (await ask(session, user("1"), max_tokens=3)).replies[0].message
        second = (await ask(session, user("1"), first, continues=True)).replies[0].message
        assert second.content == "lo"
        assert policy.contexts[1] == policy.contexts[0] + policy.tokens("hel")
        both = replace(first, content="hello")
        await ask(session, user("1"), both, continues=True)
        assert policy.contexts[2] == policy.contexts[1] + policy.tokens("lo")
        await ask(session, user("1"), replace(first, content="hello you"), user("2"))
        (made,) = session.sequences(reward=1.0)
        assert sum(made.from_policy) == len("hello you") + 1 + len("yes") + 1

    run(episode())


def test_an_answer_that_ended_goes_on_as_a_branch() -> None:
    async def episode() -> None:
        session, policy = scripted(f"hello{END}", f" you{END}")
        first = (await ask(session, user("1"))).replies[0].message
        await ask(session, user("1"), first, continues=True)
        assert decoded(session, policy.contexts[1]).endswith("assistant\nhello")
        assert len(session.sequences(reward=1.0)) == 2

    run(episode())


def test_other_arguments_of_the_template_are_another_branch() -> None:
    async def episode() -> None:
        template = CHATML + "{{ mood }}"
        session, policy = scripted(f"a{END}", f"b{END}", f"c{END}", template=template)
        glad, sad = ({"template_args": {"mood": mood}} for mood in ("glad", "sad"))
        first = (await ask(session, user("1"), **glad)).replies[0].message
        await ask(session, user("1"), first, user("2"), **sad)
        await ask(session, user("1"), first, user("2"), **glad)
        texts = [decoded(session, context) for context in policy.contexts]
        assert [text[-4:] for text in texts] == ["glad", "\nsad", "glad"]
        begun = policy.contexts[0] + policy.tokens(f"a{END}")
        assert policy.contexts[1][: len(begun)] != begun
        assert policy.contexts[2][: len(begun)] == begun

    run(episode())


def test_an_argument_that_the_template_does_not_read_is_refused_and_a_hint_is_not() -> None:
    async def episode() -> None:
        session, policy = scripted(f"a{END}", template=CHATML + "{{ effort }}")
        with pytest.raises(DataError) as caught:
            await ask(session, user("1"), template_args={"enable_thinking": False})
        assert caught.value.where == "enable_thinking"
        with pytest.raises(DataError) as caught:
            await ask(session, user("1"), template_args={"mood": 1})
        assert caught.value.where == "chat_template_kwargs.mood"
        await ask(session, user("1"), template_hints={"effort": "low", "enable_thinking": True})
        assert decoded(session, policy.contexts[0]).endswith("low")

    run(episode())


def test_the_runs_own_arguments_come_before_hints_and_make_no_branch() -> None:
    async def episode() -> None:
        args = {"effort": "low"}
        template = CHATML + "{{ effort }}"
        session, policy = scripted(
            f"a{END}", f"b{END}", f"c{END}", template=template, template_args=args
        )
        first = (
            (await ask(session, user("1"), template_hints={"effort": "high"})).replies[0].message
        )
        assert decoded(session, policy.contexts[0]).endswith("low")
        await ask(session, user("1"), first, user("2"), template_args={"effort": "low"})
        begun = policy.contexts[0] + policy.tokens(f"a{END}")
        assert policy.contexts[1][: len(begun)] == begun
        await ask(session, user("1"), template_args={"effort": "high"})
        assert decoded(session, policy.contexts[2]).endswith("high")

    run(episode())


@pytest.mark.parametrize("cut", [True, False])
def test_an_answer_with_a_call_does_not_go_on(cut: bool) -> None:
    async def episode() -> None:
        session, _ = scripted('Sure.\n<tool_call>\n{"name": "se')
        begun = ChatMessage(role="assistant", content="<tool_call>")
        if cut:
            asked = await ask(session, user("1"), tools=TOOLS, max_tokens=30)
            begun = asked.replies[0].message
        with pytest.raises(DataError) as caught:
            await ask(session, user("1"), begun, tools=TOOLS, continues=True)
        assert caught.value.where == "messages, the last one"
        assert session.figures()["unread_calls"] == float(cut)

    run(episode())


def test_a_prompt_may_open_thoughts_with_the_forms_own_mark() -> None:
    async def episode() -> None:
        session, _ = scripted(f"so</t>ok{END}", f"ok{END}")
        form = MarkedForm(name="own", thought_marks=(("assistant", "</t>"),))
        session.settings = replace(session.settings, form=form)
        asked = await ask(session, user("1"))
        message = asked.replies[0].message
        assert (message.reasoning, message.content) == ("so", "ok")

    run(episode())


def test_an_answer_that_goes_on_is_held_to_no_schema() -> None:
    async def episode() -> None:
        session, _ = scripted(f" 1{END}")
        session.settings = replace(session.settings, schemas=SchemaUse.ENFORCE)
        begun = ChatMessage(role="assistant", content='{"a": ')
        with pytest.raises(DataError) as caught:
            await ask(session, user("1"), begun, continues=True, schema={"type": "object"})
        assert caught.value.where == "response_format"

    run(episode())


def test_a_first_blank_is_told_of_what_goes_on() -> None:
    """Some decoders leave it out at the beginning of a text."""

    async def episode() -> None:
        session, _ = scripted(f" you{END}")
        decode = session.settings.decode
        session.settings = replace(
            session.settings, decode=lambda tokens: decode(tokens).removeprefix(" ")
        )
        begun = ChatMessage(role="assistant", content="hello")
        shown: list[str] = []
        request = ChatRequest(messages=(user("1"), begun), continues=True, stream=True)
        async with session.call(request, on_text=lambda _, text: shown.append(text)) as live:
            result = await live.result()
        assert result.replies[0].message.content == " you"
        assert shown
        assert all(" you".startswith(text) for text in shown)

    run(episode())


def test_a_letter_cut_in_its_middle_goes_on_as_its_bytes() -> None:
    async def episode() -> None:
        session, policy = scripted([], f"x{END}")
        whole = policy.tokens("ab日")
        assert len(whole) == 5
        policy.script[0] = whole[:4]
        first = await ask(session, user("1"))
        assert first.replies[0].message.content == "ab\ufffd"
        await ask(session, user("1"), first.replies[0].message, user("2"))
        begun = policy.contexts[0] + whole[:4]
        assert policy.contexts[1][: len(begun)] == begun

    run(episode())


@pytest.mark.parametrize(
    ("match", "arguments", "goes_on"),
    [
        (MessageMatch.TOOLS, '{ "q" : 1 }', True),
        (MessageMatch.TOOLS, '{"q": 2}', False),
        (MessageMatch.STRICT, '{"q": 1}', False),
        (MessageMatch.CONTENT, '{"q": 2}', True),
    ],
)
def test_rewritten_arguments_go_on_as_the_match_says(
    match: MessageMatch, arguments: str, goes_on: bool
) -> None:
    async def episode() -> None:
        session, policy = scripted(f"so\n{HERMES_CALL}{END}", f"done{END}", match=match)
        first = (await ask(session, user("1"), tools=TOOLS)).replies[0]
        assert first.finish is FinishReason.TOOL_CALLS
        (call,) = first.message.tool_calls
        assert (call.name, call.arguments, len(call.id)) == ("search", '{"q":1.0}', 9)
        sent = replace(first.message, tool_calls=(replace(call, arguments=arguments),))
        result = ChatMessage(role="tool", content="found", tool_call_id=call.id)
        await ask(session, user("1"), sent, result, tools=TOOLS)
        begun = policy.contexts[0] + policy.tokens(f"so\n{HERMES_CALL}{END}")
        assert (policy.contexts[1][: len(begun)] == begun) is goes_on
        assert len(session.sequences(reward=1.0)) == (1 if goes_on else 2)

    run(episode())


def test_calls_that_are_forbidden_are_text() -> None:
    async def episode() -> None:
        session, _ = scripted(f"{HERMES_CALL}{END}")
        made = await ask(session, user("1"), tools=TOOLS, tool_choice=ToolChoice.NONE)
        assert made.replies[0].message.content == HERMES_CALL
        assert made.replies[0].finish is FinishReason.STOP

    run(episode())


@pytest.mark.parametrize("keeps", [True, False])
def test_thoughts_are_kept_where_the_client_drops_them_or_the_conversation_branches(
    keeps: bool,
) -> None:
    async def episode() -> None:
        text = f"<think>\nbecause\n</think>\n\none{END}"
        session, policy = scripted(text, f"two{END}", family="qwen3", keep_thoughts=keeps)
        first = (await ask(session, user("1"))).replies[0].message
        assert (first.content, first.reasoning) == ("one", "because")
        await ask(session, user("1"), replace(first, reasoning=""), user("2"))
        begun = policy.contexts[0] + policy.tokens(text)
        assert (policy.contexts[1][: len(begun)] == begun) is keeps
        assert ("because" in decoded(session, policy.contexts[1])) is keeps
        made = session.sequences(reward=1.0)
        assert [sum(s.from_policy) for s in made] == (
            [len(policy.tokens(text)) + 4] if keeps else [len(policy.tokens(text)), 4]
        )

    run(episode())


def test_thoughts_within_a_loop_of_tools_are_no_branch() -> None:
    async def episode() -> None:
        text = f"<think>\nbecause\n</think>\n\n{HERMES_CALL}{END}"
        session, policy = scripted(text, f"two{END}", family="qwen3", keep_thoughts=False)
        first = (await ask(session, user("1"), tools=TOOLS)).replies[0].message
        result = ChatMessage(role="tool", content="x", tool_call_id=first.tool_calls[0].id)
        await ask(session, user("1"), replace(first, reasoning=""), result, tools=TOOLS)
        begun = policy.contexts[0] + policy.tokens(text)
        assert policy.contexts[1][: len(begun)] == begun

    run(episode())


@pytest.mark.parametrize(
    "change",
    [
        lambda m, t: ([user("one"), *m[1:]], t),  # the question
        lambda m, t: ([m[0], replace(m[1], content="hullo"), m[2]], t),  # the answer
        lambda m, t: ([ChatMessage(role="system", content="s"), *m], t),
        lambda m, t: (m, TOOLS),
        lambda m, t: (m[2:], t),  # its beginning forgotten
        lambda m, t: (m[:2], t),  # an answer and no question
    ],
    ids=["question", "answer", "system", "tools", "cut", "no question"],
)
def test_an_edited_history_is_another_branch(change: Callable[..., Any]) -> None:
    async def episode() -> None:
        session, policy = scripted(f"hello{END}", f"again{END}")
        answer = (await ask(session, user("1"))).replies[0].message
        messages, tools = change([user("1"), answer, user("2")], ())
        await ask(session, *messages, tools=tools)
        expected = session.settings.renderer.whole(messages, tools).tokens
        assert policy.contexts[1] == expected
        one, two = session.sequences(reward=1.0)
        assert one.tokens == policy.contexts[0] + policy.tokens(f"hello{END}")
        assert two.tokens == policy.contexts[1] + policy.tokens(f"again{END}")
        assert two.from_policy == (False,) * len(expected) + (True,) * 6

    run(episode())


# ---- several answers


def test_n_answers_are_n_samples_and_each_can_be_continued() -> None:
    async def episode() -> None:
        session, policy = scripted(f"one{END}", f"two{END}", f"so{END}")
        both = await ask(session, user("1"), n=2)
        one, two = (r.message for r in both.replies)
        assert (one.content, two.content) == ("one", "two")
        assert [n.id for n in session.tree.nodes] == [f"{both.id}-0", f"{both.id}-1"]
        await ask(session, user("1"), one, user("2"))
        begun = policy.contexts[0] + policy.tokens(f"one{END}")
        assert policy.contexts[2][: len(begun)] == begun
        made = session.sequences(reward=1.0)
        assert [sum(s.from_policy) for s in made] == [4, 4 + 3]

    run(episode())


def test_equal_texts_of_different_tokens_stay_apart() -> None:
    async def episode() -> None:
        session, policy = scripted([], [], f"so{END}")
        ids = policy.family.tokenizer
        policy.script[:2] = [ids.encode(f" answer{END}"), policy.tokens(f" answer{END}")]
        both = await ask(session, user("1"), n=2)
        assert both.replies[0].message == both.replies[1].message
        assert [r.num_tokens for r in both.replies] == [2, 8]
        await ask(session, user("1"), both.replies[0].message, user("2"))
        made = session.sequences(reward=1.0)
        assert [sum(s.from_policy) for s in made] == [2, 8 + 3]  # behind the newest

    run(episode())


# ---- stops


def test_a_stop_text_ends_the_answer_with_the_token_that_completes_it() -> None:
    async def episode() -> None:
        session, policy = scripted("one STOP and on", f"x{END}")
        reply = (await ask(session, user("1"), stop=("STOP",), logprobs=True)).replies[0]
        assert (reply.message.content, reply.stop_text) == ("one ", "STOP")
        assert (reply.finish, reply.num_tokens) == (FinishReason.STOP, 8)
        assert "".join(t.text for t in reply.logprobs) == "one STOP"
        assert [t.logprob for t in reply.logprobs] == [-float(i) for i in range(1, 9)]
        await ask(session, user("1"), reply.message, user("2"))
        begun = policy.contexts[0] + policy.tokens("one STOP")
        assert policy.contexts[1][: len(begun)] == begun
        rest = decoded(session, policy.contexts[1][len(begun) :])
        assert rest.startswith("<|im_end|>\n<|im_start|>user")

    run(episode())


@pytest.mark.parametrize("text", [f"one STOP and on{END}", f"one{HERMES_CALL} STOP x", "STOP"])
def test_streamed_text_is_a_beginning_of_the_answer(text: str) -> None:
    async def episode() -> None:
        session, _ = scripted(text)
        texts: list[str] = []
        request = ChatRequest(messages=(user("1"),), stop=("STOP", '"q"'), tools=TOOLS)
        async with session.call(request, on_text=lambda i, t: texts.append(t)) as live:
            content = (await live.result()).replies[0].message.content
        assert texts
        assert texts == sorted(texts, key=len)
        assert all(content.startswith(t) for t in texts)

    run(episode())


# ---- who has read what


def test_an_answer_that_nobody_has_read_is_not_trained_on() -> None:
    async def episode() -> None:
        session, _ = scripted(f"one{END}")
        async with session.call(ChatRequest(messages=(user("1"),))) as live:
            await live.result()
        assert session.last_node() is None
        assert session.sequences(reward=1.0) == []
        assert session.figures()["unread_answers"] == 1.0

    run(episode())


def test_who_leaves_and_asks_again_gets_the_answer_that_was_on_its_way() -> None:
    async def episode() -> None:
        session, policy = scripted(f"one{END}")
        policy.go = asyncio.Event()
        async with session.call(ChatRequest(messages=(user("1"),))) as live:
            await asyncio.sleep(0)
        policy.go.set()
        result = await ask(session, user("1"))
        assert (result.id, len(policy.contexts)) == (live.id, 1)
        assert len(session.sequences(reward=1.0)) == 1

    run(episode())


def test_two_who_wait_for_one_answer_get_the_same() -> None:
    async def episode() -> None:
        session, policy = scripted(f"one{END}", f"two{END}")
        same = await asyncio.gather(*(ask(session, user("1"), idempotency_key="k") for _ in "ab"))
        assert (same[0], len(policy.contexts)) == (same[1], 1)

    run(episode())


def test_a_failed_request_is_asked_anew_and_its_error_is_the_clients() -> None:
    async def episode() -> None:
        gone = RemoteError("gone", where="server", fix="ask again")
        session, _ = scripted(gone, f"two{END}")
        with golden.raises(RemoteError):
            await ask(session, user("1"))
        assert (await ask(session, user("1"))).replies[0].message.content == "two"
        assert len(session.sequences(reward=1.0)) == 1

    run(episode())


def test_one_of_n_that_fails_fails_them_all() -> None:
    async def episode() -> None:
        session, _ = scripted(f"one{END}", RemoteError("gone", where="server", fix="x"))
        with golden.raises(RemoteError):
            await ask(session, user("1"), n=2)
        assert session.tree.nodes == []

    run(episode())


def test_a_full_context_is_the_clients_error() -> None:
    async def episode() -> None:
        session, _ = scripted(Answer(tokens=(), logprobs=(), versions=(), stopped=False))
        with golden.raises(ContextFull):
            await ask(session, user("1"))
        assert session.sequences(reward=1.0) == []

    run(episode())


def test_an_agent_in_a_loop_is_refused_at_last() -> None:
    async def episode() -> None:
        session, _ = scripted(f"one{END}", f"two{END}")
        session.settings = replace(session.settings, max_calls=1)
        await ask(session, user("1"))
        with golden.raises(DataError):
            await ask(session, user("2"))

    run(episode())


# ---- rewards and the end


def test_rewards_are_of_an_answer_of_all_of_a_call_or_of_the_episode() -> None:
    async def episode() -> None:
        session, _ = scripted(*[f"{n}{END}" for n in "abc"])
        one = await ask(session, user("1"))
        two = await ask(session, user("2"), n=2)
        session.set_reward(1.0, call_id=one.id)
        session.set_reward(2.0, call_id=two.id)
        session.set_reward(3.0, call_id=f"{two.id}-1")
        session.set_reward(9.0)
        assert session.reward == 9.0
        assert [s.reward for s in session.sequences(reward=9.0)] == [1.0, 2.0, 3.0]
        for unknown in ("", "x", "chatcmpl-e", f"{one.id}-0", "chatcmpl-e-9"):
            with golden.raises(DataError):
                session.set_reward(0.0, call_id=unknown)

    run(episode())


def test_the_end_abandons_what_is_on_its_way_and_refuses_the_rest() -> None:
    async def episode() -> None:
        session, policy = scripted(f"one{END}")
        policy.go = asyncio.Event()
        waiting = asyncio.create_task(ask(session, user("1")))
        while not policy.contexts:
            await asyncio.sleep(0)
        await session.close()
        with pytest.raises(SessionOver):
            await waiting
        with pytest.raises(SessionOver):
            await ask(session, user("1"))
        assert session.sequences(reward=1.0) == []

    run(episode())


def test_the_first_request_is_told() -> None:
    async def episode() -> None:
        session, _ = scripted(f"one{END}")
        told = []
        session.on_first_call = lambda: told.append(1)
        await ask(session, user("1"))
        assert told

    run(episode())


def test_a_tool_without_parameters_is_called_in_every_form() -> None:
    async def episode() -> None:
        written = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
        for more in ({}, {"parameters": None}, {"parameters": {}}):
            session, _ = scripted(written + END)
            session.settings = replace(session.settings, form=ANSWER_FORMS["qwen3_coder"])
            tool = {"type": "function", "function": {"name": "now", **more}}
            (call,) = (await ask(session, user("1"), tools=(tool,))).replies[0].message.tool_calls
            assert (call.name, call.arguments) == ("now", "{}")

    run(episode())


# ---- schemas


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def with_schemas(use: SchemaUse, *script: Any) -> tuple[EpisodeSession, Any]:
    session, policy = scripted(*script)
    session.settings = replace(session.settings, schemas=use)
    return session, policy


def test_a_schema_is_refused_ignored_or_given_to_the_engine() -> None:
    async def episode() -> None:
        for use in SchemaUse:
            session, policy = with_schemas(use, f'{{"n": 1}}{END}')
            if use is SchemaUse.REFUSE:
                with golden.raises(DataError) as caught:
                    await ask(session, user("1"), schema=SCHEMA)
                assert caught.value.where == "response_format"
                continue
            result = await ask(session, user("1"), schema=SCHEMA)
            assert result.replies[0].message.content == '{"n": 1}'
            assert ("%json" in policy.wishes[0]["grammar"]) is (use is SchemaUse.ENFORCE)

    run(episode())


def test_what_must_be_held_and_some_of_the_tools_are_held_or_refused() -> None:
    async def episode() -> None:
        asked: tuple[dict[str, Any], ...] = (
            {"pattern": "[0-9]", "schema_field": "guided_regex", "must_hold": True},
            {"choices": ("1",), "schema_field": "guided_choice", "must_hold": True},
            {"schema": {"const": 1}, "schema_field": "guided_json", "must_hold": True},
            {"tools": TOOLS, "allowed_tools": (TOOLS[0]["function"]["name"],)},
        )
        for use in SchemaUse:
            for fields in asked:
                session, policy = with_schemas(use, f"1{END}")
                where = fields.get("schema_field", "tool_choice")
                if use is SchemaUse.ENFORCE:
                    await ask(session, user("1"), **fields)
                    assert policy.wishes[0]["grammar"]
                elif use is SchemaUse.IGNORE and where == "tool_choice":
                    await ask(session, user("1"), **fields)
                    assert policy.wishes[0]["grammar"] == ""
                else:
                    with pytest.raises(DataError) as caught:
                        await ask(session, user("1"), **fields)
                    assert caught.value.where == where
                    assert "schema=enforce" in caught.value.fix

    run(episode())


def test_a_schema_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take seconds, and others are answered meanwhile."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen = asyncio.Event()

        def fault(grammar: str) -> str:
            # Ends only because the loop goes on
            asyncio.run_coroutine_threadsafe(notes(), loop).result(timeout=60)
            return ""

        async def notes() -> None:
            seen.set()

        monkeypatch.setattr(request_places, "grammar_fault", fault)
        session, _ = with_schemas(SchemaUse.ENFORCE, f'{{"n": 1}}{END}')
        await ask(session, user("1"), schema=SCHEMA)
        assert seen.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [1, 200, 5000, 40_000])
def test_a_growing_answer_is_read_less_often_the_longer_it_is(num_tokens: int) -> None:
    answer = GrowingAnswer()
    read = [n for n in range(1, num_tokens + 1) if answer.is_due(n)]
    assert read[:200] == [*range(1, min(num_tokens, 200) + 1)]
    assert num_tokens - read[-1] <= num_tokens / 256 + 1
    assert sum(read) <= 257 * num_tokens


def test_tools_that_must_be_called_are_given_to_the_engine_where_schemas_are() -> None:
    async def episode() -> None:
        for use in SchemaUse:
            session, policy = with_schemas(use, HERMES_CALL + END, f"free{END}")
            required = {"tools": TOOLS, "tool_choice": ToolChoice.REQUIRED}
            result = await ask(session, user("1"), **required)
            assert result.replies[0].finish is FinishReason.TOOL_CALLS
            assert bool(policy.wishes[0]["grammar"]) is (use is SchemaUse.ENFORCE)
            await ask(session, user("2"), tools=TOOLS)
            assert policy.wishes[1]["grammar"] == ""

    run(episode())


def test_others_are_answered_while_a_schema_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def slow(grammar: str) -> str:
        assert answered.wait(60), "the event loop waits for the schema"
        return ""

    async def episode() -> None:
        monkeypatch.setattr(request_places, "grammar_fault", slow)
        session, _ = with_schemas(SchemaUse.ENFORCE, f'{{"n": 1}}{END}')
        held = asyncio.create_task(ask(session, user("1"), schema=SCHEMA))
        other, _ = scripted(f"one{END}")
        assert await ask(other, user("2"))
        answered.set()
        assert (await held).replies[0].message.content == '{"n": 1}'

    run(episode())


def test_a_schema_that_cannot_be_held_is_the_clients_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def episode() -> None:
        session, policy = with_schemas(SchemaUse.ENFORCE, f"1{END}")
        with golden.raises(DataError) as caught:
            await ask(session, user("1"), schema={"not": {"type": "string"}})
        assert caught.value.where == "response_format"
        deep: dict[str, Any] = {"type": "integer"}
        for _ in range(900):
            deep = {"type": "array", "items": deep}
        with golden.raises(DataError):
            await ask(session, user("3"), schema=deep)
        monkeypatch.setattr(extras, "find_spec", lambda name: None)
        with golden.raises(DataError) as caught:
            await ask(session, user("2"), schema=SCHEMA)
        assert "realsys[schemas]" in caught.value.fix
        assert policy.contexts == []

    run(episode())
