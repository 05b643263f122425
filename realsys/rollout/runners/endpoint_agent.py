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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realsys.api.agent import (
    AgentHost,
    Answer,
    Ask,
    DoubtfulEnd,
    Episode,
    EpisodeAgent,
    EpisodeTask,
)
from realsys.rollout.conversation.chat_messages import Unserved
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.form_choice import choose_form
from realsys.rollout.conversation.message_matching import MessageMatch
from realsys.rollout.conversation.renderer_choice import make_renderer
from realsys.rollout.conversation.reply_grammar import special_tokens
from realsys.rollout.conversation.session_settings import SchemaUse, SessionSettings
from realsys.rollout.endpoint.endpoint_app import endpoint_app
from realsys.rollout.endpoint.session_registry import SessionRegistry
from realsys.rollout.runners.agent_arguments import ConversationArguments, EndpointArguments
from realsys.rollout.runners.episode_marks import EpisodeMarks
from realsys.rollout.runners.episode_outcome import (
    AgentOutcome,
    EpisodeAddress,
    EpisodeDropped,
    EpisodeSeat,
    finished_episode,
)
from realsys.transport.http_listener import HttpListener

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CERTIFICATE_FILE = "endpoint.pem"
PLACE_S = 60.0  # longest that an episode counts among those that start
MOST_BEGINNINGS = 5  # of an episode that others' faults end
_PURPOSE = b"realsys agents' endpoint: administrator's key"


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
        grammar: str = "",
        answer_prefix: int = 0,
    ) -> Answer:
        """Samples an answer; ``sampling`` is ignored."""
        more = {"answer_prefix": answer_prefix} if answer_prefix else {}
        return await self._ask(
            tokens, limit, stop=stop, on_tokens=on_tokens, grammar=grammar, **more
        )


@dataclass(eq=False, kw_only=True)
class EndpointAgent(EndpointArguments, EpisodeAgent):
    """What every agent behind the endpoint shares: a listener, and an episode's session.

    Attributes:
        url: where the endpoint listens. certificate: what clients trust there; None: plain HTTP.
        from_outside: clients may be on other nodes.
    """

    url: str = field(init=False, default="")
    certificate: Path | None = field(init=False, default=None)
    from_outside = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.registry = SessionRegistry()
        self._listener: HttpListener | None = None
        self._starting = asyncio.Semaphore(self.starting_at_once)

    # ---- life ------------------------------------------------------------------------------------

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint."""
        self.host, self._marks = host, EpisodeMarks(host.folder)
        self.settings = replace(
            session_settings(self, host, schemas=SchemaUse(self.schema)),
            unserved=Unserved(self.unserved),
        )
        tls = self._listens_by_tls
        self._listener = await HttpListener(
            endpoint_app(self.registry),
            name="agents' endpoint",
            tls=tls,
            host=host.host if tls else LOOPBACK,
            ports=host.ports if tls else None,
        ).start()
        self.url = self._listener.url.partition("#")[0]
        if tls:
            self.certificate = host.folder / CERTIFICATE_FILE
            host.folder.mkdir(parents=True, exist_ok=True)
            self.certificate.write_text(self._listener.cert_pem)
        logger.info("endpoint started url=%s", self.url)

    @property
    def _listens_by_tls(self) -> bool:
        if self.listen is None:
            return self.from_outside and self.host.host != LOOPBACK
        return self.listen == "https"

    async def close(self) -> None:
        """Stops the endpoint."""
        if self._listener is not None:
            await self._listener.stop()
        if hasattr(self, "_marks"):
            self._marks.close()

    # ---- an episode ------------------------------------------------------------------------------

    async def run_episode(self, task: EpisodeTask) -> Episode:
        """Runs ``play`` with a session for each role, and scores what became of them.

        Raises:
            EpisodeDropped: it was ended through no fault of its own, again and again.
            DoubtfulEnd, RolloutError: as ``finished_episode``; also what ``play`` raises.
        """
        self._marks.began(task.id)
        try:
            return await self._run_episode(task)
        finally:
            self._marks.ended(task.id)

    async def _run_episode(self, task: EpisodeTask) -> Episode:
        for number in range(1, MOST_BEGINNINGS + 1):
            seats = [self._seat(task, role) for role in self.roles or ("",)]
            try:
                outcome = await self.play(task, seats)
                break
            except DoubtfulEnd as error:
                outcome = AgentOutcome(doubt=error)
                break
            except EpisodeDropped as error:
                logger.warning(
                    "episode dropped episode=%s times=%d why=%s", task.id, number, error.what
                )
                if number == MOST_BEGINNINGS:
                    raise
            finally:
                for seat in seats:
                    self.registry.close(seat.address.key)
                    await seat.session.close()
        return await finished_episode(task, seats, outcome, failed_reward=self.failed_reward)

    @abc.abstractmethod
    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Has the agent do its task. What it raises fails the episode, which is played again; after
        EpisodeDropped it is called again, with new seats. After DoubtfulEnd, if the policy has answered,
        the episode is played once more, and scored as failed if that ends so, too.

        Args:
            seats: one, or one for each role.
        """

    def out_of_time(self, seats: Sequence[EpisodeSeat], what: str) -> AgentOutcome:
        """Returns the outcome of an episode that took longer than ``timeout_s``.

        Raises:
            DoubtfulEnd: one answer of the policy was on its way for more than half of that time: it may be
                a server that is slow.
        """
        asked_s = max(seat.session.asked_s() for seat in seats)
        if 2 * asked_s > self.timeout_s and all(seat.session.reward is None for seat in seats):
            raise DoubtfulEnd(
                f"{what}, and had waited for an answer of the policy for {asked_s:.3g} s",
                where=seats[0].session.id,
                fix="see why generation is slow, or raise task.agent_args.timeout_s",
            )
        return AgentOutcome(problem=what)

    def _seat(self, task: EpisodeTask, role: str) -> EpisodeSeat:
        id_ = f"{task.id}-{role}" if role else task.id
        session = EpisodeSession(id=id_, policy=AskPolicy(task.ask), settings=self.settings)
        key = self.registry.open(session)
        address = EpisodeAddress(
            base_url=f"{self.url}/v1",
            session_url=f"{self.url}/sessions/{key}/v1",
            key=key,
            model=self.settings.model,
            certificate=self.certificate,
        )
        return EpisodeSeat(role=role, session=session, address=address)

    @asynccontextmanager
    async def starting(self, seats: Sequence[EpisodeSeat]) -> AsyncIterator[None]:
        """Waits for a place among those that start, and gives it up at the first request, at the end, or
        after ``PLACE_S``: one that hangs before it asks anything must not keep others from starting."""
        await self._starting.acquire()
        held = [True]

        def leave() -> None:
            if held:
                held.clear()
                self._starting.release()

        for seat in seats:
            seat.session.on_first_call = leave
        late = asyncio.get_running_loop().call_later(PLACE_S, leave)
        try:
            yield
        finally:
            late.cancel()
            leave()

    def task_json(self, task: EpisodeTask) -> dict[str, Any]:
        """Returns what an agent gets to know of its task, as JSON."""
        record = {
            k: v
            for k, v in task.record.items()
            if self.with_answer or k not in ("answer", "record")
        }
        return {"id": task.id, **record}


def session_settings(
    agent: ConversationArguments, host: AgentHost, *, schemas: SchemaUse = SchemaUse.REFUSE
) -> SessionSettings:
    """Makes what all sessions of an agent share."""
    tokenizer = host.tokenizer
    renderer = make_renderer(
        agent.renderer,
        tokenizer,
        end_ids=host.end_ids,
        template=agent.template or None,
        template_args=agent.template_args,
        keep_thoughts=agent.keep_thoughts,
        marks_as_text=agent.marks_as_text,
    )

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    form = choose_form(agent.form, tokenizer, renderer=agent.renderer, template=renderer.template)
    return SessionSettings(
        renderer=renderer,
        form=form,
        decode=decode,
        encode=lambda text: list(tokenizer(text).input_ids),
        num_ids=len(tokenizer) if hasattr(tokenizer, "__len__") else None,
        end_ids=host.end_ids,
        match=MessageMatch(agent.match),
        max_calls=agent.max_calls,
        schemas=schemas,
        special=special_tokens(tokenizer),
    )


def admin_key(secret: bytes) -> str:
    """Derives the administrator's key of a trial's endpoints; it is never stored."""
    return "sk-admin-" + hashlib.blake2b(_PURPOSE, key=secret[:64], digest_size=24).hexdigest()
