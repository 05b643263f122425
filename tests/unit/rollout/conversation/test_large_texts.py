"""Long conversations are rendered beside the event loop, short ones at once; each message is read once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from chat_families import FAMILIES
from scripted_policy import END, scripted

from realsys.rollout.conversation import message_matching
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolCall
from realsys.rollout.conversation.chat_rendering import TemplateRenderer
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.large_texts import LARGE, beside_loop, size_of

LONG = "five " * (LARGE // 4)


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


async def ask(session: EpisodeSession, *messages: ChatMessage) -> ChatMessage:
    async with session.call(ChatRequest(messages=messages)) as live:
        result = await live.result()
        live.read()
    return result.replies[0].message


class WatchedRenderer:
    """Notes in which thread it renders; a rendering in another one ends only if the loop goes on."""

    def __init__(self, renderer: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._renderer, self._loop = renderer, loop
        self.was_beside: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def _note(self) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        self.was_beside.append(beside)
        if beside:
            turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
            turn.result(timeout=60)

    def whole(self, *args: Any, **more: Any) -> Any:
        self._note()
        return self._renderer.whole(*args, **more)

    def behind(self, *args: Any, **more: Any) -> Any:
        self._note()
        return self._renderer.behind(*args, **more)


def test_a_long_conversation_is_rendered_beside_the_loop() -> None:
    async def episode() -> None:
        session, policy = scripted(f"a{END}", f"b{END}", f"c{END}")
        watched = WatchedRenderer(session.settings.renderer, asyncio.get_running_loop())
        session.settings = replace(session.settings, renderer=watched)
        short = await ask(session, user("1"))
        assert watched.was_beside == [False]
        await ask(session, user("1"), short, user(LONG))
        assert watched.was_beside == [False, True]
        begun = policy.contexts[0] + policy.tokens(f"a{END}")
        assert policy.contexts[1][: len(begun)] == begun
        await ask(session, user(LONG))
        assert watched.was_beside == [False, True, True]

    asyncio.run(asyncio.wait_for(episode(), 100))


def test_a_turn_reads_each_message_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were all read again for the answer."""
    read: list[ChatMessage] = []
    real = message_matching._text_of
    monkeypatch.setattr(
        message_matching, "_text_of", lambda m, match: (read.append(m), real(m, match))[1]
    )

    async def episode() -> None:
        session, _ = scripted(*[f"yes{END}"] * 8)
        messages: list[ChatMessage] = []
        for turn in range(8):
            messages.append(user(str(turn)))
            read.clear()
            messages.append(await ask(session, *messages))
            assert len(read) == len(messages)

    asyncio.run(asyncio.wait_for(episode(), 100))


def test_what_is_large() -> None:
    call = ToolCall(id="1", name="f", arguments="x" * 7)
    messages = (user("12345"), ChatMessage(role="assistant", content="", tool_calls=(call,)))
    assert size_of(ChatRequest(messages=messages)) == 12
    assert size_of(ChatRequest(messages=messages, tools=({}, {}))) > 1000

    async def where(size: int) -> bool:
        return await beside_loop(threading.current_thread, size=size) is threading.main_thread()

    async def both() -> list[bool]:
        return [await where(LARGE - 1), await where(LARGE)]

    assert asyncio.run(both()) == [True, False]


class CountedText(str):
    """Counts the characters that may be searched."""

    searched = 0

    def find(self, sub: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        found = super().find(sub, start)
        CountedText.searched += (len(self) if found < 0 else found + len(sub)) - start
        return found

    def __contains__(self, sub: object) -> bool:
        CountedText.searched += len(self)
        return super().__contains__(sub)  # type: ignore[operator]


def test_thoughts_are_looked_for_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["chatml"]
    renderer = TemplateRenderer(family.tokenizer, end_ids=family.end_ids, keep_thoughts=False)
    thoughts = [f"thought {i}, and so on" for i in range(50)]
    messages = [ChatMessage(role="assistant", content="x", reasoning=t) for t in thoughts]
    text = CountedText(" ".join(thoughts))
    monkeypatch.setattr(renderer, "_text", lambda *args: text)
    CountedText.searched = 0
    assert not renderer._drops_thoughts(messages, 50, (), {})
    assert CountedText.searched <= len(text)
    text = CountedText(" ".join([*thoughts[25:], *thoughts[:25]]))
    assert not renderer._drops_thoughts(messages, 50, (), {})
    text = CountedText(" ".join(thoughts[:49]))
    assert renderer._drops_thoughts(messages, 50, (), {})
