"""Prompts as texts and tokens in an episode: what the policy is asked with, what is trained on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from scripted_policy import END, ScriptedPolicy, scripted

from realsys.api.errors import DataError
from realsys.rollout.conversation.chat_messages import (
    ChatMessage,
    ChatRequest,
    ChatResult,
    FinishReason,
    Prompt,
)
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.session_settings import SchemaUse


async def complete(session: EpisodeSession, *prompts: Prompt, **more: Any) -> ChatResult:
    request = ChatRequest(messages=(), prompts=prompts, token_ids=True, **more)
    async with session.call(request) as live:
        result = await live.result()
        live.read()
    return result


def run(episode: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(episode, 100))


def sampled(policy: ScriptedPolicy, *texts: str) -> list[int]:
    return [t for text in texts for t in policy.tokens(text)]


def trained(session: EpisodeSession) -> list[list[int]]:
    """Returns the trained tokens of each sequence."""
    return [
        [t for t, p in zip(made.tokens, made.from_policy, strict=True) if p]
        for made in session.sequences(reward=1.0)
    ]


def test_tokens_are_asked_as_given_and_their_answer_is_trained_on() -> None:
    async def episode() -> None:
        session, policy = scripted(f"hello{END}")
        result = await complete(session, (5, 6, 7), max_tokens=9)
        assert policy.contexts == [(5, 6, 7)]
        assert policy.wishes[0]["limit"] == 9
        (reply,) = result.replies
        assert (reply.message.content, reply.finish) == ("hello", FinishReason.STOP)
        assert list(reply.token_ids) == sampled(policy, f"hello{END}")
        assert (reply.prompt_ids, result.num_prompt_tokens) == ((5, 6, 7), 3)
        (made,) = session.sequences(reward=2.0)
        assert list(made.tokens) == [5, 6, 7, *reply.token_ids]
        assert trained(session) == [list(reply.token_ids)]
        assert made.reward == 2.0

    run(episode())


def test_a_text_is_tokenised_once_and_no_template_is_applied() -> None:
    async def episode() -> None:
        session, policy = scripted(f" and so{END}")
        result = await complete(session, "once upon")
        assert policy.contexts == [tuple(session.settings.encode("once upon"))]
        assert result.replies[0].message.content == " and so"

    run(episode())


def test_tokens_that_begin_with_an_earlier_sequence_continue_it() -> None:
    async def episode() -> None:
        session, policy = scripted("ab", f"cd{END}", f"ef{END}")
        first = (await complete(session, (5, 6))).replies[0]
        assert first.finish is FinishReason.LENGTH
        behind = (*first.prompt_ids, *first.token_ids)
        second = (await complete(session, behind)).replies[0]  # nothing between
        third = await complete(session, (*behind, *second.token_ids, 9, 8))
        assert third.num_cached == len(behind) + len(second.token_ids)
        (made,) = session.sequences(reward=1.0)
        assert made.tokens == policy.contexts[2] + policy.tokens(f"ef{END}")
        assert trained(session) == [sampled(policy, "ab", f"cd{END}", f"ef{END}")]
        assert session.figures()["branches"] == 1.0

    run(episode())


def test_another_beginning_is_a_branch_whose_context_is_not_trained_again() -> None:
    async def episode() -> None:
        session, policy = scripted(f"ab{END}", f"cd{END}", f"ef{END}")
        first = (await complete(session, (5, 6))).replies[0]
        behind = (*first.prompt_ids, *first.token_ids)
        await complete(session, (*behind, 7))
        await complete(session, (*behind[:-1], 7))  # without its end: not what was sampled
        assert policy.contexts[2] == (*behind[:-1], 7)
        assert trained(session) == [
            sampled(policy, f"ab{END}", f"cd{END}"),
            sampled(policy, f"ef{END}"),
        ]

    run(episode())


def test_answers_that_share_a_beginning_are_trained_once() -> None:
    async def episode() -> None:
        session, policy = scripted(f"ab{END}", f"cd{END}", f"ef{END}")
        first = (await complete(session, (5, 6))).replies[0]
        behind = (*first.prompt_ids, *first.token_ids)
        await complete(session, (*behind, 7), (*behind, 8))
        made = session.sequences(reward=1.0)
        assert [m.tokens[: len(behind)] for m in made] == [behind, behind]
        assert trained(session) == [
            sampled(policy, f"ab{END}", f"cd{END}"),
            sampled(policy, f"ef{END}"),
        ]

    run(episode())


def test_tokens_may_continue_a_conversation() -> None:
    async def episode() -> None:
        session, policy = scripted(f"ab{END}", f"cd{END}")
        request = ChatRequest(messages=(ChatMessage(role="user", content="1"),), token_ids=True)
        async with session.call(request) as live:
            (said,) = (await live.result()).replies
            live.read()
        assert said.prompt_ids == policy.contexts[0]
        await complete(session, (*said.prompt_ids, *said.token_ids, 7))
        assert trained(session) == [sampled(policy, f"ab{END}", f"cd{END}")]

    run(episode())


def test_several_answers_to_several_prompts_are_numbered_in_order() -> None:
    async def episode() -> None:
        session, policy = scripted(*(f"{letter}{END}" for letter in "abcd"))
        result = await complete(session, (5,), (6, 6), n=2)
        assert policy.contexts == [(5,), (5,), (6, 6), (6, 6)]
        assert [r.message.content for r in result.replies] == list("abcd")
        assert result.num_prompt_tokens == 3
        assert [n.id for n in session.tree.nodes] == [f"{result.id}-{i}" for i in range(4)]
        session.set_reward(3.0, call_id=f"{result.id}-2")
        assert [m.reward for m in session.sequences(reward=1.0)] == [1.0, 1.0, 3.0, 1.0]

    run(episode())


def test_a_stop_text_ends_an_answer_with_the_token_that_completes_it() -> None:
    async def episode() -> None:
        session, policy = scripted(f"abcd{END}", f"x{END}")
        (reply,) = (await complete(session, (5,), stop=("bc",))).replies
        assert (reply.message.content, reply.finish) == ("a", FinishReason.STOP)
        assert list(reply.token_ids) == sampled(policy, "abc")
        await complete(session, (5, *reply.token_ids, 9))
        assert trained(session) == [sampled(policy, "abc", f"x{END}")]

    run(episode())


def test_marks_and_thoughts_are_text() -> None:
    async def episode() -> None:
        text = "  <think>so</think>\n<tool_call>{}</tool_call> "
        session, _ = scripted(text + END)
        told: list[str] = []
        request = ChatRequest(messages=(), prompts=((5,),))
        async with session.call(request, on_text=lambda i, text: told.append(text)) as live:
            (reply,) = (await live.result()).replies
        assert (reply.message.content, reply.token_ids) == (text, ())
        assert all(text.startswith(piece) for piece in told)
        assert told[-1].strip()

    run(episode())


def test_a_retry_gets_the_same_answer_and_an_unread_one_is_not_trained_on() -> None:
    async def episode() -> None:
        session, policy = scripted(f"ab{END}")
        request = ChatRequest(messages=(), prompts=((5,),))
        async with session.call(request) as live:
            first = await live.result()
        assert session.sequences(reward=1.0) == []
        async with session.call(replace(request, retries=1)) as live:
            assert (await live.result()).replies == first.replies
            live.read()
        assert len(policy.contexts) == len(session.sequences(reward=1.0)) == 1

    run(episode())


@pytest.mark.parametrize("prompt", ["", (-1,), (5, 10**6)])
def test_tokens_that_are_none_are_refused(prompt: Prompt) -> None:
    async def episode() -> None:
        session, policy = scripted(f"ab{END}")
        with pytest.raises(DataError) as caught:
            await complete(session, prompt)
        assert (caught.value.where, policy.contexts) == ("prompt", [])

    run(episode())


def test_completions_are_held_to_what_conversations_are() -> None:
    async def episode() -> None:
        form: dict[str, Any] = {"pattern": "[ab]", "schema_field": "regex", "must_hold": True}
        session, _ = scripted(f"a{END}")
        with pytest.raises(DataError) as caught:
            await complete(session, (5,), **form)
        assert caught.value.where == "regex"
        session.settings = replace(session.settings, schemas=SchemaUse.ENFORCE)
        held, policy = scripted(f"a{END}")
        held.settings = session.settings
        await complete(held, (5,), **form)
        assert "[ab]" in policy.wishes[0]["grammar"]

    run(episode())


@pytest.mark.parametrize("seed", range(20))
def test_every_trained_token_was_sampled_behind_the_tokens_before_it(seed: int) -> None:
    """A client that goes on behind what it was told, behind a part or an edited form of it, or anew."""

    async def episode() -> None:
        draw = random.Random(seed)
        script = [[draw.randrange(9) for _ in range(draw.randrange(1, 5))] for _ in range(40)]
        session, policy = scripted(*script)
        told: list[tuple[int, ...]] = [()]
        while len(policy.contexts) < 30:
            begun = list(draw.choice(told))
            match draw.randrange(4):
                case 0:
                    begun = begun[: draw.randrange(len(begun) + 1)]
                case 1 if begun:
                    begun[draw.randrange(len(begun))] = draw.randrange(9)
            more = [draw.randrange(9) for _ in range(draw.randrange(not begun, 3))]
            result = await complete(session, tuple(begun + more), n=draw.randrange(1, 3))
            told += [(*reply.prompt_ids, *reply.token_ids) for reply in result.replies]
        sampled_at = Counter(zip(policy.contexts, map(tuple, script), strict=False))
        trained_at: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        for made in session.sequences(reward=1.0):
            at = 0
            while at < len(made.tokens):
                if not made.from_policy[at]:
                    at += 1
                    continue
                (answer,) = {
                    a
                    for c, a in sampled_at
                    if c == made.tokens[:at]
                    and a == made.tokens[at : at + len(a)]
                    and made.logprobs[at : at + len(a)]
                    == tuple(-float(i + 1) for i in range(len(a)))
                    and (
                        at + len(a) == len(made.tokens)
                        or made.logprobs[at + len(a)] != -float(len(a) + 1)
                    )
                }
                trained_at[made.tokens[:at], answer] += 1
                at += len(answer)
        assert trained_at == sampled_at

    run(episode())
