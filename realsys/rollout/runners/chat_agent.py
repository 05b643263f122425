"""Agent that holds a conversation with an environment: by chat template, with the environment's tools.

The conversation is kept by the same session that agents behind the endpoint have, without HTTP in
between, so both give the policy the same tokens and train on the same sequences::

    question, opening ─▶ answer ─┬─ calls ─▶ environment.call ─▶ results ─▶ next answer
                                 └─ none ──▶ environment.step ─▶ text ────▶ next answer, or the end
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realsys.api.agent import (
    AgentHost,
    Environment,
    Episode,
    EpisodeAgent,
    EpisodeTask,
    Observation,
)
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest, ToolCall
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.full_context import ContextFull
from realsys.rollout.dialects import chat_completions
from realsys.rollout.runners.agent_arguments import ChatArguments
from realsys.rollout.runners.endpoint_agent import AskPolicy, session_settings


@dataclass(eq=False, kw_only=True)
class ChatAgent(ChatArguments, EpisodeAgent):
    """``agent=chat``: answers until the environment is done, at most ``max_turns`` times.

    Rewards are summed. An answer with tool calls goes to ``environment.call``, any other to
    ``environment.step``. A conversation that ends behind calls, because turns or context are used up, is
    scored by a last ``step`` with the text beside them, so that a rule scores every episode.
    """

    async def open(self, host: AgentHost) -> None:
        """Reads the chat template."""
        self._settings = session_settings(self, host)

    def first_prompt(self, prompt: Any, environment: Environment | None) -> tuple[int, ...]:
        """Returns the tokens that the policy sees first of a record's prompt; after ``open``.

        Args:
            environment: reset to the record; None: without its opening and tools.
        Raises:
            DataError: the template does not take it.
        """
        request = self._first_request(prompt, environment)
        return self._settings.renderer.whole(request.messages, request.tools).tokens

    def _first_request(self, prompt: Any, environment: Environment | None) -> ChatRequest:
        return first_request(
            prompt,
            system=self.system,
            opening="" if environment is None else environment.opening(),
            tools=() if environment is None else environment.tools(),
        )

    async def run_episode(self, task: EpisodeTask) -> Episode:
        """Runs the conversation to its end.

        Raises:
            DataError: the question alone fills the model's context, or the template does not take it.
        """
        request = self._first_request(task.record["prompt"], task.environment)
        session = EpisodeSession(id=task.id, policy=AskPolicy(task.ask), settings=self._settings)
        conversation = _Conversation(task=task, session=session, request=request)
        try:
            await conversation.play(self.max_turns, timeout_s=self.timeout_s)
        finally:
            await session.close()
        return conversation.episode()


def first_request(
    prompt: Any, *, system: str, opening: str, tools: Sequence[Mapping[str, Any]]
) -> ChatRequest:
    """Returns what the policy is asked first (pure).

    Args:
        prompt: of the record: a text, or messages.
        opening: is put behind the question, in the same message.
    Raises:
        DataError: these are no messages or tools as Chat Completions has them.
    """
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.strip()}]
    else:
        messages = [dict(message) for message in prompt]
    if system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    opening = whole_letters(opening)
    if opening and messages[-1]["role"] == "user":
        messages[-1]["content"] = f"{messages[-1]['content']}\n\n{opening}"
    elif opening:
        messages.append({"role": "user", "content": opening})
    offered = {"tools": [dict(tool) for tool in tools]} if tools else {}
    body = {"model": "", "messages": messages, **offered}
    return chat_completions.read(json.dumps(body).encode(), {})


@dataclass(eq=False, kw_only=True)
class _Conversation:
    """An episode under way.

    Attributes:
        request: as it was first; ``messages`` are those of the next one.
        answered: the last answer was given to ``step``.
    """

    task: EpisodeTask
    session: EpisodeSession
    request: ChatRequest
    messages: list[ChatMessage] = field(default_factory=list)
    reward: float = 0.0
    is_done: bool = False
    answered: bool = False
    turns: int = 0
    num_calls: int = 0
    num_wrong_calls: int = 0
    is_full: bool = False
    info: dict[str, float] = field(default_factory=dict)

    async def play(self, max_turns: int, *, timeout_s: float) -> None:
        """Has the policy and the environment speak in turns; after ``timeout_s`` none begins."""
        self.messages = list(self.request.messages)
        clock = asyncio.get_running_loop().time
        ends_s = clock() + timeout_s
        while not self.is_done and self.turns < max_turns and await self._answer():
            message = self.messages[-1]
            if message.tool_calls:
                for call in message.tool_calls:
                    text = await self._called(call)
                    self.messages.append(
                        ChatMessage(role="tool", content=text, tool_call_id=call.id)
                    )
                    if self.is_done:
                        break
            else:
                text = await self._stepped(message.content)
                self.messages.append(ChatMessage(role="user", content=text))
            if clock() > ends_s:
                break
        if not self.is_done and not self.answered:
            last = self.session.last_node()
            await self._stepped(last.message.content if last is not None else "")

    async def _answer(self) -> bool:
        """Adds the policy's next answer. Returns False if the conversation fills the model's context."""
        request = replace(self.request, messages=tuple(self.messages))
        try:
            async with self.session.call(request) as live:
                result = await live.result()
                live.read()
        except ContextFull:
            if not self.turns:
                raise
            self.is_full = True
            return False
        self.turns += 1
        self.answered = False
        self.messages.append(result.replies[0].message)
        return True

    async def _stepped(self, text: str) -> str:
        self.answered = True
        if (last := self.session.last_node()) is not None:
            self.task.environment.sampled(last.scored_answer)
        return self._noted(await self.task.environment.step(text))

    async def _called(self, call: ToolCall) -> str:
        """Calls a tool; returns its result, or what was wrong with the call."""
        self.num_calls += 1
        names = [tool["function"]["name"] for tool in self.request.tools]
        problem, arguments = "", None
        if call.name not in names:
            problem = f"there is no tool {call.name!r}; there are: {', '.join(names)}"
        elif (arguments := arguments_of(call)) is None:
            problem = "the arguments are no JSON object"
        if problem or arguments is None:
            self.num_wrong_calls += 1
            return f"Error: {problem}"
        return self._noted(await self.task.environment.call(call.name, arguments))

    def _noted(self, observation: Observation) -> str:
        self.reward += observation.reward
        self.is_done = observation.done
        self.info.update(observation.info)
        return whole_letters(observation.text)

    def episode(self) -> Episode:
        """Returns what is trained on."""
        return Episode(
            sequences=tuple(self.session.sequences(reward=self.reward)),
            reward=self.reward,
            stats={
                **self.info,
                "turns": float(self.turns),
                "tool_calls": float(self.num_calls),
                "wrong_calls": float(self.num_wrong_calls),
                "full_context": float(self.is_full),
                "branches": self.session.figures()["branches"],
            },
        )


def whole_letters(text: str) -> str:
    """Returns a text with question marks for halves of letters, which JSON holds and tokenizers can't."""
    return text.encode("utf-8", "replace").decode()


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Returns the arguments of a call, without halves of letters; None if they are no JSON object."""
    try:
        arguments = json.loads(call.arguments)
        whole = whole_letters(json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError):
        return None
    return json.loads(whole) if isinstance(arguments, dict) else None
