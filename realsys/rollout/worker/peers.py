"""Calls to a worker that may come back elsewhere: a manager that was restarted has another endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from realsys.api.errors import StoreError, WaitTimeout, WorkerLost
from realsys.transport.channel import RequestClient

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2  # while the worker is not registered


class Peer:
    """One worker by name. Its owner closes it. Within one event loop.

    Args:
        look_up: its endpoint, from name resolution; blocks, and raises a StoreError while there is none.
        connect: a client for an endpoint, not yet open.
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
        """The reply to ``body``.

        Args:
            try_s: after so long without one it is looked up where the peer is now, and asked anew: for
                requests that may be run twice. None: one request, repeated by the channel.
        Raises:
            WaitTimeout: no reply in ``timeout_s``; names the peer and why not.
            what the peer raised.
        """
        clock = asyncio.get_running_loop().time
        ends_s, trouble, used = clock() + timeout_s, "it was not asked", None
        while (left_s := ends_s - clock()) > 0:
            try:
                used = await self._now(used)
                return await used.call(body, timeout_s=min(left_s, try_s or left_s), what=what)
            except (WaitTimeout, WorkerLost, StoreError) as error:
                if error.from_worker:
                    raise  # the peer answered, with this
                trouble = error.what
                if isinstance(error, WorkerLost):
                    self._broken = used
                if not isinstance(error, WaitTimeout):
                    await asyncio.sleep(min(_LOOK_AGAIN_S, left_s))
        raise WaitTimeout(
            f"{self.name} did not answer to {what} in {timeout_s:g} s: {trouble}",
            where=self._client.endpoint if self._client is not None else "name resolution",
            fix=f"look at the log of {self.name}",
        )

    async def close(self) -> None:
        """Calls in progress end with WorkerLost."""
        if self._client is not None:
            await self._client.close()

    async def _now(self, failed: RequestClient | None) -> RequestClient:
        """An open client; if it is ``failed``, then because the peer is still where it was."""
        async with self._changing:
            client = self._client
            if client is not None and client is not failed:
                return client
            endpoint = await asyncio.to_thread(self._look_up)
            if client is not None and client.endpoint == endpoint and client is not self._broken:
                return client
            self._client = self._connect(endpoint).open()
            if client is not None:
                logger.info("peer connected anew peer=%s endpoint=%s", self.name, endpoint)
                await client.close()  # others that wait there come here
            return self._client
