"""Calls to a worker that may be restarted elsewhere: looks its endpoint up again if it does not reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from realsys.api.errors import StoreError, WaitTimeout, WorkerLost
from realsys.transport.channel import RequestClient

logger = logging.getLogger(__name__)

_LOOKUP_RETRY_S = 0.2  # while the worker is not registered


class Peer:
    """Client of one worker by name, within one event loop. Its owner closes it.

    Args:
        look_up: returns its endpoint from name resolution; blocks, and raises a StoreError if it has none.
        connect: makes a client for an endpoint, not yet open.
    """

    def __init__(
        self, name: str, *, look_up: Callable[[], str], connect: Callable[[str], RequestClient]
    ) -> None:
        self.name = name
        self._look_up, self._connect = look_up, connect
        self._client: RequestClient | None = None
        self._broken: RequestClient | None = None
        self._changing = asyncio.Lock()

    async def call(
        self, body: object, *, what: str, timeout_s: float, try_s: float | None = None
    ) -> Any:
        """Sends ``body`` and returns the reply.

        Args:
            try_s: time without reply after which the endpoint is looked up and the request sent again, for
                idempotent requests. None: one request, repeated by the channel.
        Raises:
            WaitTimeout: no reply in ``timeout_s``; names the peer and the reason.
            Also errors that the peer raised.
        """
        clock = asyncio.get_running_loop().time
        ends_s, trouble, used = clock() + timeout_s, "it was not asked", None
        while (left_s := ends_s - clock()) > 0:
            try:
                used = await self._now(used)
                return await used.call(body, timeout_s=min(left_s, try_s or left_s), what=what)
            except (WaitTimeout, WorkerLost, StoreError) as error:
                if error.from_worker:
                    raise  # the peer replied with this error
                trouble = error.what
                if isinstance(error, WorkerLost):
                    self._broken = used
                if not isinstance(error, WaitTimeout):
                    await asyncio.sleep(min(_LOOKUP_RETRY_S, left_s))
        raise WaitTimeout(
            f"{self.name} did not answer to {what} in {timeout_s:g} s: {trouble}",
            where=self._client.endpoint if self._client is not None else "name resolution",
            fix=f"see the log of {self.name}",
        )

    async def close(self) -> None:
        """Closes the connection; calls in progress raise WorkerLost."""
        if self._client is not None:
            await self._client.close()

    async def _now(self, failed: RequestClient | None) -> RequestClient:
        """Returns an open client; reuses ``failed`` if the endpoint has not changed."""
        async with self._changing:
            client = self._client
            if client is not None and client is not failed:
                return client
            endpoint = await asyncio.to_thread(self._look_up)
            if client is not None and client.endpoint == endpoint and client is not self._broken:
                return client
            self._client = self._connect(endpoint).open()
            if client is not None:
                logger.info("peer reconnected peer=%s endpoint=%s", self.name, endpoint)
                await client.close()  # other waiting calls also get here
            return self._client
