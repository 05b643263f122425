"""Streams that their clients leave: what had been written is the answer, and nothing behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from scripted_policy import END, ScriptedPolicy, scripted

from realsys.api.agent import Trajectory
from realsys.api.errors import RemoteError
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ChatResult
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.pending_call import SessionOver

HELLO = f"hello world{END}"


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def request(*messages: ChatMessage, **more: Any) -> ChatRequest:
    return ChatRequest(messages=messages or (user("1"),), stream=True, **more)


def said(content: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=content)


async def ask(session: EpisodeSession, asked: ChatRequest) -> ChatResult:
    """Reads an answer to its end."""
    async with session.call(asked) as live:
        result = await live.result()
        live.read()
    return result


async def leave(
    session: EpisodeSession, asked: ChatRequest, *texts: str, wrote: Sequence[str] = ()
) -> None:
    """Waits until each reply's text is so long, and leaves; ``wrote``: what was written of it, if less."""
    seen: dict[int, str] = {}
    async with session.call(asked, on_text=seen.__setitem__) as live:
        async with asyncio.timeout(60):
            while any(len(seen.get(i, "")) < len(text) for i, text in enumerate(texts)):
                await asyncio.sleep(0)
        for i, text in enumerate(wrote or texts):
            live.wrote(i, text)


def trained(made: Trajectory) -> list[int]:
    return [t for t, p in zip(made.tokens, made.from_policy, strict=True) if p]


def halting(*script: str, **more: Any) -> tuple[EpisodeSession, ScriptedPolicy]:
    """A session whose policy stops in the middle of each answer until ``halfway`` is set."""
    session, policy = scripted(*script, **more)
    policy.halfway = asyncio.Event()
    return session, policy


def counts(session: EpisodeSession) -> tuple[float, ...]:
    """Calls, branches and answers that nobody has read."""
    return tuple(session.figures()[name] for name in ("calls", "branches", "unread_answers"))


def run(episode: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(episode, 100))


def test_what_was_written_is_trained_on_and_the_rest_is_not_sampled() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO)
        await leave(session, request(), "hello")
        (made,) = session.sequences(reward=0.5)
        sampled = policy.tokens("hello")
        assert made.tokens == policy.contexts[0] + sampled
        assert trained(made) == [*sampled]
        assert made.logprobs[-5:] == (-1.0, -2.0, -3.0, -4.0, -5.0)
        assert (made.reward, made.truncated) == (0.5, False)
        assert session.last_node().message.content == "hello"  # type: ignore[union-attr]
        assert session.figures() == {
            "calls": 1.0,
            "branches": 1.0,
            "unread_answers": 0.0,
            "unread_calls": 0.0,
        }
        while any(t.get_name().startswith("chatcmpl") for t in asyncio.all_tasks()):
            await asyncio.sleep(0)  # nobody samples the rest
        await session.close()
        assert session.sequences(reward=0.5) == [made]

    run(episode())


@pytest.mark.parametrize("wrote", ["h", "hel", "hello"])
def test_only_what_was_written_counts_however_much_there_is(wrote: str) -> None:
    async def episode() -> None:
        session, policy = halting(HELLO)
        await leave(session, request(), "hello", wrote=[wrote])
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens(wrote)]

    run(episode())


def test_an_answer_that_was_whole_before_its_end_was_written_is_cut_too() -> None:
    async def episode() -> None:
        session, policy = scripted(HELLO)
        async with session.call(request(), on_text=lambda i, text: None) as live:
            await live.result()
            live.wrote(0, "hel")
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens("hel")]
        assert len(session.tree.nodes) == 1

    run(episode())


def test_of_which_nothing_was_written_is_not_read_and_goes_on() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO)
        async with session.call(request(), on_text=lambda i, text: None):
            await asyncio.sleep(0)
        assert policy.halfway is not None
        policy.halfway.set()
        while not session.tree.nodes:
            await asyncio.sleep(0)
        assert session.sequences(reward=1.0) == []
        assert session.figures()["unread_answers"] == 1.0
        assert (await ask(session, request())).replies[0].message.content == "hello world"
        assert len(policy.contexts) == 1

    run(episode())


def test_its_text_as_history_goes_on_behind_its_tokens() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO, f"yes{END}")
        await leave(session, request(), "hello")
        policy.halfway = None
        await ask(session, request(user("1"), said("hello"), user("2")))
        begun = policy.contexts[0] + policy.tokens("hello")
        assert policy.contexts[1][: len(begun)] == begun
        rest = session.settings.decode(policy.contexts[1][len(begun) :])
        assert rest.startswith("<|im_end|>\n<|im_start|>user\n2")
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens("hello"), *policy.tokens(f"yes{END}")]

    run(episode())


def test_its_text_begun_again_goes_on_with_its_tokens() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO, f" you{END}")
        await leave(session, request(), "hello")
        policy.halfway = None
        await ask(session, request(user("1"), said("hello"), continues=True))
        assert policy.contexts[1] == policy.contexts[0] + policy.tokens("hello")

    run(episode())


@pytest.mark.parametrize("retries", [0, 1])
def test_who_comes_again_gets_the_rest_and_it_is_one_answer(retries: int) -> None:
    async def episode() -> None:
        session, policy = halting(HELLO, f" there{END}", f"third{END}")
        await leave(session, request(max_tokens=40), "hello")
        policy.halfway = None
        texts: list[str] = []
        again = request(max_tokens=40, retries=retries)
        async with session.call(again, on_text=lambda i, text: texts.append(text)) as live:
            result = await live.result()
            live.read()
        assert result.replies[0].message.content == "hello there"
        assert result.replies[0].num_tokens == 12
        assert all(text.startswith("hello") for text in texts)
        begun = policy.tokens("hello")
        assert policy.contexts[1] == policy.contexts[0] + begun
        assert (policy.wishes[1]["answer_prefix"], policy.wishes[1]["limit"]) == (5, 40)
        (made,) = session.sequences(reward=1.0)
        assert made.tokens == policy.contexts[1] + policy.tokens(f" there{END}")
        assert trained(made) == [*begun, *policy.tokens(f" there{END}")]
        history = request(user("1"), said("hello there"), user("2"))
        await ask(session, history)
        assert policy.contexts[2][: len(made.tokens)] == made.tokens
        assert len(session.sequences(reward=1.0)) == 1

    run(episode())


def test_an_answer_with_no_room_left_is_told_again_as_it_was_cut() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO)
        await leave(session, request(max_tokens=5), "hello")
        result = await ask(session, request(max_tokens=5))
        assert result.replies[0].message.content == "hello"
        assert len(policy.contexts) == 1
        assert len(session.sequences(reward=1.0)) == 1

    run(episode())


def test_who_leaves_again_with_no_more_wants_another_answer_next() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO, HELLO, f"other{END}")
        await leave(session, request(), "hello")
        await leave(session, request(), "hello", wrote=["hello"])
        assert len(session.sequences(reward=1.0)) == 1
        policy.halfway = None
        assert (await ask(session, request())).replies[0].message.content == "other"
        assert len(session.sequences(reward=1.0)) == 2

    run(episode())


def test_who_leaves_again_with_more_has_all_of_it_trained_once() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO, f" to you all{END}", f"!{END}")
        await leave(session, request(), "hello")
        await leave(session, request(), "hello to ")
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens("hello"), *policy.tokens(" to ")]
        policy.halfway = None
        assert (await ask(session, request())).replies[0].message.content == "hello to !"
        (made,) = session.sequences(reward=1.0)
        sampled = [*policy.tokens("hello"), *policy.tokens(" to "), *policy.tokens(f"!{END}")]
        assert trained(made) == sampled

    run(episode())


def test_thoughts_before_what_was_written_are_trained_with_it() -> None:
    async def episode() -> None:
        session, policy = halting(
            f"<think>\nmuch to say\n</think>\n\nhi and a long rest of it{END}", family="qwen3"
        )
        assert policy.halfway is not None
        await leave(session, request(), "hi")
        (made,) = session.sequences(reward=1.0)
        text = session.settings.decode(trained(made))
        assert text == "<think>\nmuch to say\n</think>\n\nhi"
        message = session.last_node().message  # type: ignore[union-attr]
        assert (message.reasoning.strip(), message.content) == ("much to say", "hi")

    run(episode())


def test_of_several_replies_each_is_cut_where_it_was_written() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO, f"quite another{END}", f"more{END}")
        await leave(session, request(n=2), "hel", "quite", wrote=["hel", ""])
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens("hel")]

    run(episode())


def test_a_letter_of_several_tokens_is_whole_or_not_there() -> None:
    async def episode() -> None:
        session, policy = halting(f"日本語の長い答え{END}")
        await leave(session, request(), "日本")
        (made,) = session.sequences(reward=1.0)
        assert session.settings.decode(trained(made)) == "日本"
        assert len(trained(made)) == len(policy.tokens("日本"))

    run(episode())


def test_a_session_that_ends_keeps_what_was_written_of_its_streams() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO)
        texts: dict[int, str] = {}
        async with session.call(request(), on_text=texts.__setitem__) as live:
            while len(texts.get(0, "")) < 5:
                await asyncio.sleep(0)
            live.wrote(0, "hello")
            await session.close()
            with pytest.raises(SessionOver):
                await live.result()
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens("hello")]

    run(episode())


def test_a_session_that_ends_behind_the_last_byte_of_a_stream_keeps_the_whole_answer() -> None:
    async def episode() -> None:
        session, policy = scripted(HELLO)
        async with session.call(request(), on_text=lambda i, text: None) as live:
            await live.result()
            live.wrote(0, "hello")
            live.read()
            await session.close()  # before the block has ended
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens(HELLO)]

    run(episode())


def test_while_somebody_else_reads_it_nothing_is_cut() -> None:
    async def episode() -> None:
        session, policy = halting(HELLO)
        texts: dict[int, str] = {}
        async with session.call(request(), on_text=texts.__setitem__) as first:
            while len(texts.get(0, "")) < 5:
                await asyncio.sleep(0)
            first.wrote(0, "hello")
            later: dict[int, str] = {}
            again = session.call(request(retries=1), on_text=later.__setitem__)
            live = await again.__aenter__()
            assert later[0].startswith("hello")  # what there was already
        assert policy.halfway is not None
        policy.halfway.set()
        assert (await live.result()).replies[0].message.content == "hello world"
        live.read()
        await again.__aexit__(None, None, None)
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens(HELLO)]

    run(episode())


def test_a_reward_of_its_id_is_that_of_what_was_written() -> None:
    async def episode() -> None:
        session, _ = halting(HELLO)
        await leave(session, request(), "hello")
        session.set_reward(0.25, call_id="chatcmpl-e-0")
        (made,) = session.sequences(reward=1.0)
        assert made.reward == 0.25

    run(episode())


@pytest.mark.parametrize("is_whole", [False, True])
def test_who_has_read_less_than_was_written_goes_on_behind_what_it_has_read(
    is_whole: bool,
) -> None:
    """However much of the answer was in the sockets when it left."""

    async def episode() -> None:
        session, policy = scripted(HELLO, f"yes{END}")
        if is_whole:
            async with session.call(request(), on_text=lambda i, text: None) as live:
                await live.result()
                live.read()
        else:
            policy.halfway = asyncio.Event()
            await leave(session, request(), "hello")
            policy.halfway = None
        await ask(session, request(user("1"), said("hel"), user("2")))
        first = policy.contexts[0] + policy.tokens("hel")
        assert policy.contexts[1][: len(first)] == first
        rest = session.settings.decode(policy.contexts[1][len(first) :])
        assert rest.startswith("<|im_end|>\n<|im_start|>user\n2")
        left, went_on = session.sequences(reward=1.0)
        written = policy.tokens(HELLO if is_whole else "hello")
        assert trained(left) == [*written]
        assert left.tokens == policy.contexts[0] + written
        assert trained(went_on) == [*policy.tokens(f"yes{END}")]
        assert session.figures() == {
            "calls": 2.0,
            "branches": 2.0,
            "unread_answers": 0.0,
            "unread_calls": 0.0,
        }
        session.set_reward(0.25, call_id="chatcmpl-e-0")
        assert {(s.reward, len(trained(s))) for s in session.sequences(reward=1.0)} == {
            (0.25, len(written)),  # one answer, although it was split
            (1.0, 4),
        }

    run(episode())


def test_part_of_an_answer_that_was_no_stream_is_another_conversation() -> None:
    async def episode() -> None:
        session, policy = scripted(HELLO, f"yes{END}")
        await ask(session, request())
        await ask(session, request(user("1"), said("hel"), user("2")))
        first = policy.contexts[0] + policy.tokens("hel")
        assert policy.contexts[1][: len(first)] != first
        assert len(session.sequences(reward=1.0)) == 2

    run(episode())


def test_an_answer_in_parts_is_one_answer_to_whoever_scores_it() -> None:
    """The rest has the reward that was set before it, a rule gets all tokens, and all are one sequence."""

    async def episode() -> None:
        session, policy = scripted(HELLO, f" world{END}")
        policy.halfway = asyncio.Event()
        await leave(session, request(), "hello")
        policy.halfway = None
        session.set_reward(0.25, call_id="chatcmpl-e-0")
        await ask(session, request())
        (made,) = session.sequences(reward=1.0)
        node = session.last_node()
        assert node is not None
        assert node.is_rest
        assert node.scored_answer.tokens == tuple(trained(made))
        assert made.reward == 0.25

    run(episode())


def test_what_was_read_whole_is_forgotten_but_for_its_tokens() -> None:
    """Else an episode of many requests holds the square of them: 200 MB where 4 will do."""

    async def episode() -> None:
        session, _ = scripted(HELLO)
        async with session.call(request(user("x" * 999)), on_text=lambda i, text: None) as live:
            await live.result()
            counts = live.prompt_tokens()
            assert live.work.places
            live.read()
        assert live.work.places == ()
        assert live.prompt_tokens() == counts
        (node,) = session.tree.nodes
        assert node.content_of is not None
        held = [cell.cell_contents for cell in node.content_of.__closure__ or ()]
        held += [c.cell_contents for f in held for c in getattr(f, "__closure__", None) or ()]
        assert not any(isinstance(one, ChatRequest) for one in held)
        assert all(len(one) < 20 for one in held if isinstance(one, list | tuple))

    run(episode())


def test_a_request_that_has_failed_behind_an_answer_does_not_go_on_with_it() -> None:
    """Only one that is on its way does: what a client had got before it left is trained on."""

    async def episode() -> None:
        away = RemoteError("no server", where="a test", fix="wait")
        session, policy = scripted(HELLO, away)
        async with session.call(request(), on_text=lambda i, text: None) as live:
            await live.result()
            said_all = live.work.nodes[0].message
            with pytest.raises(RemoteError):
                await ask(session, request(user("1"), said_all, user("2")))
            live.wrote(0, "hello")
        (made,) = session.sequences(reward=1.0)
        assert trained(made) == [*policy.tokens("hello")]

    run(episode())
