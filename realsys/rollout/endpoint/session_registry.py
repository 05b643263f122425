"""Sessions by key: who may ask, and which episode a request belongs to.

A session's key is in the path of its base URL and may be sent as the bearer key: clients that fix the
URL need the one, clients that fix the key the other. It is random, so that it is all that a client has
to know.

Sessions are opened by a runner (realsys/rollout/runners/), in this process, or by a client from
outside with the administrator's key (``POST /rl/start_session``), as long as the source of episodes
has one to give.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from realsys.api.errors import TrialError
from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.session_settings import SessionSettings

KEY_PREFIX = "sk-sess-"
_MOST_ENDED = 4096  # remembered, for clients that ask again, or end theirs again
_NEW_SESSION = "ask in a session that is open: no answer can belong to this one any more"


class UnknownKey(TrialError):
    """No session has this key; it has ended, or the key is wrong."""


class KeyInUse(TrialError):
    """Another client's session has this key."""


class NoRoom(TrialError):
    """No episode may start now: staleness allows no more. ``retry_s``: when to ask again."""

    retry_s = 1.0


class SessionFinder(Protocol):
    """Finds the session in which a request is answered, by the request's key."""

    def settings_of(self, key: str) -> SessionSettings:
        """Returns how requests with this key are understood.

        Raises:
            UnknownKey: nobody has it.
        """

    def lent(self, key: str) -> AbstractAsyncContextManager[EpisodeSession]:
        """Gives the session while one request is answered in it.

        Raises:
            UnknownKey: nobody has the key. NoRoom: the request should come again later.
        """


@dataclass(frozen=True, kw_only=True)
class StartedEpisode:
    """An episode that a client from outside has started. ``task``: what it is to do, as JSON."""

    session: EpisodeSession
    task: Mapping[str, Any]


@dataclass(frozen=True)
class EndedEpisode:
    """What is told of an episode that its client has ended. ``id``: of its session."""

    id: str
    reward: float | None


class EpisodeSource(Protocol):
    """Gives episodes to clients from outside, and takes back what became of them."""

    async def start(self, *, task_id: str, wait_s: float) -> StartedEpisode:
        """Starts an episode.

        Raises:
            NoRoom: there is none to give.
        """

    async def end(self, session: EpisodeSession) -> None:
        """Takes the episode of ``session``, which the client has ended."""


@dataclass(eq=False)
class SessionRegistry:
    """All open sessions of an endpoint, a ``SessionFinder``. Used by one event loop.

    Args:
        admin_key: of ``/rl/start_session``; empty: nobody can start a session from outside.
    """

    admin_key: str = field(default="", repr=False)
    source: EpisodeSource | None = None
    _sessions: dict[str, EpisodeSession] = field(default_factory=dict, repr=False)
    _from_outside: set[str] = field(default_factory=set, repr=False)
    _ended: dict[str, EndedEpisode] = field(default_factory=dict, repr=False)  # of outside, by key
    _closed: dict[str, None] = field(default_factory=dict, repr=False)  # keys, the oldest first

    def open(self, session: EpisodeSession, *, key: str = "", from_outside: bool = False) -> str:
        """Registers a session and returns its key.

        Raises:
            KeyInUse: a session that was not started from outside has this key.
        """
        key = key or KEY_PREFIX + secrets.token_urlsafe(24)
        if key in self._sessions:
            raise KeyInUse(
                "a session with this key is open", where="api_key", fix="use a key of its own"
            )
        self._sessions[key] = session
        self._ended.pop(key, None)
        self._closed.pop(key, None)
        if from_outside:
            self._from_outside.add(key)
        return key

    def close(self, key: str) -> None:
        """Forgets a session; requests with its key are refused from now on."""
        if self._sessions.pop(key, None) is not None:
            self._closed[key] = None
            for oldest in list(self._closed)[:-_MOST_ENDED]:
                del self._closed[oldest]
        self._from_outside.discard(key)

    def close_from_outside(self, session: EpisodeSession) -> None:
        """Forgets a session's keys that clients from outside have."""
        for key in [k for k in self._from_outside if self._sessions.get(k) is session]:
            self.close(key)

    def find(self, key: str) -> EpisodeSession:
        """Returns the session of a key.

        Raises:
            UnknownKey: none has it. TrialError: the one that had it has ended.
        """
        session = self._sessions.get(key)
        if session is None and key in self._closed:
            raise TrialError("the episode of this key has ended", where="key", fix=_NEW_SESSION)
        if session is None:
            raise UnknownKey(
                "no open session has this key",
                where="the bearer key, or the path",
                fix="use the base URL and key that the runner or /rl/start_session gave",
            )
        return session

    def settings_of(self, key: str) -> SessionSettings:
        """Returns the settings of a key's session."""
        return self.find(key).settings

    @asynccontextmanager
    async def lent(self, key: str) -> AsyncIterator[EpisodeSession]:
        """Gives a key's session, which lives on."""
        yield self.find(key)

    def is_admin(self, key: str) -> bool:
        """True for the administrator's key."""
        sent = key.encode("utf-8", "surrogateescape")  # a header may hold any bytes
        return bool(self.admin_key) and hmac.compare_digest(sent, self.admin_key.encode())

    # ---- clients from outside ---------------------------------------------------------------

    async def start(self, *, task_id: str, key: str, wait_s: float) -> tuple[str, StartedEpisode]:
        """Starts an episode for a client from outside; one that the key had before ends.

        Raises:
            NoRoom: no episode may start now. KeyInUse: the key is that of a runner's session.
        """
        if self.source is None:
            raise TrialError(
                "this endpoint gives no episodes to clients from outside",
                where="/rl/start_session",
                fix="run with task.agent=external",
            )
        await self._end_former(key)
        started = await self.source.start(task_id=task_id, wait_s=wait_s)
        await self._end_former(key)  # of another client that waited at the same time
        return self.open(started.session, key=key, from_outside=True), started

    async def _end_former(self, key: str) -> None:
        while key in self._sessions:
            if key not in self._from_outside:
                raise KeyInUse(
                    "a session with this key is open", where="api_key", fix="use a key of its own"
                )
            await self.end(key)

    async def end(self, key: str) -> EndedEpisode:
        """Ends a session by its key. Who has not heard the reply may end it again, and is told the same.

        Raises:
            UnknownKey: none has it, nor had it lately.
        """
        if key not in self._sessions and key in self._ended:
            return self._ended[key]
        session = self.find(key)
        session.is_over = True
        ended = EndedEpisode(session.id, session.reward)
        if key in self._from_outside:
            self.close(key)
            self._ended[key] = ended
            for oldest in list(self._ended)[:-_MOST_ENDED]:
                del self._ended[oldest]
            assert self.source is not None
            await self.source.end(session)
        return ended
