"""Base of agents that speak to the policy over the endpoint: one session an episode.

run_episode ─ opens a session ─▶ play (a subclass: a program, a function, a client from outside)
                                    │ requests ─▶ endpoint ─▶ session ─▶ ask
             closes it ◀────────────┘ outcome
             reward: what the agent has set, or returned, or else what the environment gives its last answer
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from realsys.api.agent import AgentHost, Answer, Ask, Episode, EpisodeAgent, EpisodeTask
from realsys.api.errors import RolloutError
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, form_of_template
from realsys.rollout.conversation.chat_rendering import TemplateRenderer
from realsys.rollout.conversation.episode_session import EpisodeSession, SessionSettings
from realsys.rollout.conversation.message_matching import MessageMatch
from realsys.rollout.endpoint.endpoint_app import endpoint_app
from realsys.rollout.endpoint.session_registry import SessionRegistry
from realsys.rollout.runners.agent_arguments import EndpointArguments
from realsys.transport.http_listener import HttpListener

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_PURPOSE = b"realsys agents' endpoint: administrator's key"


@dataclass(frozen=True, kw_only=True)
class EpisodeAddress:
    """Where an agent finds the policy. ``session_url`` holds the key, for clients that can't be
    given one.
    """

    base_url: str
    session_url: str
    key: str = field(repr=False)
    model: str = "policy"

    @property
    def root_url(self) -> str:
        """Without ``/v1``, as Anthropic's clients want it."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class AgentOutcome:
    """How an agent's episode ended.

    Attributes:
        reward: that it gave itself; None: it gave none.
        text: what the environment scores; None: the policy's last answer.
        problem: why it failed; empty: it did not.
        stats: numbers for the metrics.
    """

    reward: float | None = None
    text: str | None = None
    problem: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)


class AskPolicy:
    """A ``SessionPolicy`` that samples as the run does, whatever a client wishes."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
        on_tokens: Callable[[Sequence[int]], None] | None,
    ) -> Answer:
        """Samples an answer; ``sampling`` is ignored."""
        return await self._ask(tokens, limit, stop=stop, on_tokens=on_tokens)


@dataclass(eq=False, kw_only=True)
class EndpointAgent(EndpointArguments, EpisodeAgent):
    """What every agent behind the endpoint shares: a listener, and an episode's session."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.registry = SessionRegistry()
        self._listener: HttpListener | None = None
        self._starting = asyncio.Semaphore(self.starting_at_once)

    # ---- life ------------------------------------------------------------------------------------

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint, on the loopback interface."""
        self.host = host
        self.settings = session_settings(self, host)
        app = endpoint_app(self.registry)
        self._listener = await HttpListener(
            app, name="agents' endpoint", tls=False, host=LOOPBACK
        ).start()
        logger.info("endpoint started url=%s", self._listener.url)

    async def close(self) -> None:
        """Stops the endpoint."""
        if self._listener is not None:
            await self._listener.stop()

    @property
    def url(self) -> str:
        """Where the endpoint listens."""
        assert self._listener is not None
        return self._listener.url

    # ---- an episode ------------------------------------------------------------------------------

    async def run_episode(self, task: EpisodeTask) -> Episode:
        """Runs ``play`` over a session of its own, and scores what became of it."""
        session = EpisodeSession(id=task.id, policy=AskPolicy(task.ask), settings=self.settings)
        key = self.registry.open(session)
        address = EpisodeAddress(
            base_url=f"{self.url}/v1",
            session_url=f"{self.url}/sessions/{key}/v1",
            key=key,
            model=self.settings.model,
        )
        try:
            outcome = await self.play(task, session, address)
        finally:
            self.registry.close(key)
            await session.close()
        return await finished_episode(task, session, outcome, failed_reward=self.failed_reward)

    @abc.abstractmethod
    async def play(
        self, task: EpisodeTask, session: EpisodeSession, address: EpisodeAddress
    ) -> AgentOutcome:
        """Has the agent do its task. What it raises fails the question, which is answered anew."""

    @asynccontextmanager
    async def starting(self, session: EpisodeSession) -> AsyncIterator[None]:
        """Waits for a place among those that start, and gives it up at the first request, or at the end."""
        await self._starting.acquire()
        held = [True]

        def leave() -> None:
            if held:
                held.clear()
                self._starting.release()

        session.on_first_call = leave
        try:
            yield
        finally:
            leave()

    def told(self, task: EpisodeTask) -> dict[str, Any]:
        """Returns what an agent gets to know of its task, as JSON."""
        record = {
            k: v
            for k, v in task.record.items()
            if self.with_answer or k not in ("answer", "record")
        }
        return {"id": task.id, **record}


def session_settings(agent: EndpointAgent, host: AgentHost) -> SessionSettings:
    """Makes what all sessions of an agent share."""
    tokenizer = host.tokenizer
    renderer = TemplateRenderer(
        tokenizer,
        end_ids=host.end_ids,
        template=agent.template or None,
        template_args=agent.template_args,
        keep_thoughts=agent.keep_thoughts,
    )

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    form = ANSWER_FORMS[agent.form] if agent.form else form_of_template(str(renderer.template))
    return SessionSettings(
        renderer=renderer,
        form=form,
        decode=decode,
        end_ids=host.end_ids,
        match=MessageMatch(agent.match),
        max_calls=agent.max_calls,
    )


async def finished_episode(
    task: EpisodeTask, session: EpisodeSession, outcome: AgentOutcome, *, failed_reward: float
) -> Episode:
    """Scores an episode and turns its conversation into sequences.

    Raises:
        RolloutError: the policy was not asked, so there is nothing to train on.
    """
    last = session.last_node()
    if last is None:
        raise RolloutError(
            "the agent ended without an answer of the policy: "
            + (outcome.problem or "it made no request"),
            where=f"episode {task.id}",
            fix="see its log; it must use the base URL and the key that it is given",
        )
    stats: dict[str, float] = {**outcome.stats, "failed": float(bool(outcome.problem))}
    if session.reward is not None:
        reward = session.reward
    elif outcome.reward is not None:
        reward = outcome.reward
    elif outcome.problem:
        logger.info("agent failed episode=%s problem=%s", task.id, outcome.problem)
        reward = failed_reward
    else:
        task.environment.sampled(last.answer)
        text = last.message.content if outcome.text is None else outcome.text
        observation = await task.environment.step(text)
        reward = observation.reward
        stats |= observation.info
    sequences = session.sequences(reward=reward)
    return Episode(
        sequences=tuple(sequences),
        reward=reward,
        stats={**stats, **session.figures()},
        shares_reward=all(s.reward == reward for s in sequences),
    )


def admin_key(secret: bytes) -> str:
    """Derives the administrator's key of a trial's endpoints; it is never stored."""
    return "sk-admin-" + hashlib.blake2b(_PURPOSE, key=secret[:64], digest_size=24).hexdigest()
