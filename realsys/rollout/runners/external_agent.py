"""An agent outside of the run: whoever has the administrator's key starts an episode, when there is
one to start.

A rollout worker's episodes wait here for clients. So a client gets an episode exactly as far as
staleness allows one to start, and is told to ask again (429) otherwise; what it does not finish in
time is given out again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from realsys.api.agent import AgentHost, EpisodeTask
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.endpoint.session_registry import NoRoom, StartedEpisode
from realsys.rollout.runners.agent_arguments import ExternalArguments
from realsys.rollout.runners.endpoint_agent import EndpointAgent, admin_key
from realsys.rollout.runners.episode_outcome import AgentOutcome, EpisodeSeat
from realsys.trial.temporary_names import temporary_beside

logger = logging.getLogger(__name__)

ADDRESS_FILE = "endpoint.json"


@dataclass(eq=False)
class _Offer:
    """An episode that waits for a client, or for its client to end it."""

    task: EpisodeTask
    session: EpisodeSession
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, kw_only=True)
class ExternalAgent(ExternalArguments, EndpointAgent):
    """``agent=external``: clients start, reward and end their episodes by ``/rl/…``.

    ``timeout_s`` is that of an episode, from its start; one that has not started waits as long as it must.
    """

    from_outside = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offers: deque[_Offer] = deque()
        self._offered = asyncio.Event()
        self._by_session: dict[str, _Offer] = {}
        self.registry.source = self

    async def open(self, host: AgentHost) -> None:
        """Starts the endpoint and writes its address, with the administrator's key, for this user only."""
        self.registry.admin_key = admin_key(host.secret)
        await super().open(host)
        host.folder.mkdir(parents=True, exist_ok=True)
        address = {
            "base_url": f"{self.url}/v1",
            "url": self.url,
            "admin_key": self.registry.admin_key,
            "certificate": None if self.certificate is None else str(self.certificate),
        }
        path = host.folder / ADDRESS_FILE
        new = temporary_beside(path)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(address, file)
        new.rename(path)

    async def play(self, task: EpisodeTask, seats: Sequence[EpisodeSeat]) -> AgentOutcome:
        """Waits until a client has taken the episode, asked the policy and ended it.

        What a client leaves unfinished, or ends without an answer, is offered anew.
        """
        (seat,) = seats
        while True:
            offer = _Offer(task, seat.session)
            if await self._is_finished(offer):
                return AgentOutcome()
            self.registry.close_from_outside(seat.session)
            await seat.session.restart()

    async def _is_finished(self, offer: _Offer) -> bool:
        session = offer.session
        self._offers.append(offer)
        self._by_session[session.id] = offer
        self._offered.set()
        try:
            await offer.taken.wait()
            try:
                async with asyncio.timeout(self.timeout_s):
                    await offer.ended.wait()
            except TimeoutError:
                logger.warning(
                    "client did not end its episode episode=%s timeout_s=%g",
                    session.id,
                    self.timeout_s,
                )
                return False
            if session.last_node() is None:
                logger.info("client ended without an answer episode=%s", session.id)
                return False
            return True
        finally:
            if offer in self._offers:
                self._offers.remove(offer)
            del self._by_session[session.id]
            session.is_over = True

    # ---- an EpisodeSource ------------------------------------------------------------------------

    async def start(self, *, task_id: str, wait_s: float) -> StartedEpisode:
        """Gives the episode that has waited longest, or the one of ``task_id``."""
        ends_s = asyncio.get_running_loop().time() + wait_s
        while True:
            fits = [o for o in self._offers if not task_id or o.task.id.startswith(task_id)]
            if fits:
                break
            self._offered.clear()
            left_s = ends_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise NoRoom(
                    "no episode may start now: those that staleness allows are given out",
                    where="/rl/start_session",
                    fix="ask again; Retry-After says when",
                )
            try:
                async with asyncio.timeout(left_s):
                    await self._offered.wait()
            except TimeoutError:
                continue
        offer = fits[0]
        self._offers.remove(offer)
        offer.taken.set()
        return StartedEpisode(session=offer.session, task=self.task_json(offer.task))

    async def end(self, session: EpisodeSession) -> None:
        """Ends the episode of a client."""
        if (offer := self._by_session.get(session.id)) is not None:
            offer.ended.set()
