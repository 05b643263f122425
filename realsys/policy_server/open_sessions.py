"""Sessions of a served model: each request is one of its own, for whoever has the server's key.

A ``SessionFinder``. Nothing is remembered between requests but the engine's cache of prefixes, so clients
send whole conversations, as they do to any such API.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from realsys.rollout.conversation.episode_session import EpisodeSession
from realsys.rollout.conversation.session_settings import SessionPolicy, SessionSettings
from realsys.rollout.endpoint.session_registry import NoRoom, UnknownKey


class OpenSessions:
    """Opens a session for each request. Used by one event loop.

    Args:
        make_policy: makes what samples the answers of one request.
        max_requests: on their way at the same time; more are refused, to come again.
    """

    def __init__(
        self,
        settings: SessionSettings,
        make_policy: Callable[[], SessionPolicy],
        *,
        key: str,
        max_requests: int,
    ) -> None:
        self._settings, self._make_policy = settings, make_policy
        self._key, self._max_requests = key.encode(), max_requests
        self._num_open = 0

    def settings_of(self, key: str) -> SessionSettings:
        """Returns the settings of all sessions.

        Raises:
            UnknownKey: it is not the server's.
        """
        sent = key.encode("utf-8", "surrogateescape")  # a header may hold any bytes
        if not hmac.compare_digest(sent, self._key):
            raise UnknownKey(
                "the key is missing or wrong",
                where="header Authorization",
                fix="send Authorization: Bearer KEY, with the key that realsys serve was given or printed",
            )
        return self._settings

    @asynccontextmanager
    async def lent(self, key: str) -> AsyncIterator[EpisodeSession]:
        """Opens a session for one request and closes it: an answer that nobody waits for any more ends."""
        with self.place(key) as policy:
            session = EpisodeSession(
                id=secrets.token_hex(8), policy=policy, settings=self._settings
            )
            try:
                yield session
            finally:
                await session.close()

    @contextmanager
    def place(self, key: str) -> Iterator[SessionPolicy]:
        """Gives a policy to one request.

        Raises:
            UnknownKey: the key is wrong. NoRoom: too many requests are on their way.
        """
        self.settings_of(key)
        if self._num_open >= self._max_requests:
            raise NoRoom(
                f"{self._num_open} requests are on their way",
                where="realsys serve --max-requests",
                fix="try again in a moment",
            )
        self._num_open += 1
        try:
            yield self._make_policy()
        finally:
            self._num_open -= 1
