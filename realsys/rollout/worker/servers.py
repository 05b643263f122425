"""Connections to generation servers, one per URL that the manager assigns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from realsys.transport.generation_messages import GenerationClient
from realsys.transport.rollout_messages import UseServer

CHECK_S = 15.0  # time limit of a health check, which generates a token


def server_name(index: int) -> str:
    """Returns a server's worker name, such as ``generation_server/3``."""
    return f"generation_server/{index}"


@dataclass
class _Connection:
    url: str
    client: GenerationClient
    users: int = 0


class ServerClients:
    """Opens clients on demand and closes those of servers that have moved.

    Args:
        make_client: (URL as registered, name of the server) → client.
    """

    def __init__(self, make_client: Callable[[str, str], GenerationClient]) -> None:
        self._make_client = make_client
        self._newest: dict[int, _Connection] = {}
        self._former: list[_Connection] = []
        self._looks: dict[str, asyncio.Task[bool]] = {}

    @asynccontextmanager
    async def using(self, use: UseServer) -> AsyncIterator[GenerationClient]:
        """Yields the client of a server, which stays open at least until the block ends."""
        connection = self._connection(use)
        connection.users += 1
        try:
            yield connection.client
        finally:
            connection.users -= 1
            await self._close_former()

    async def is_well(self, use: UseServer, client: GenerationClient, *, within_s: float) -> bool:
        """Checks a server's health. Concurrent callers share one check."""
        look = self._looks.get(use.url)
        if look is None or look.done():
            checking = client.healthy(timeout_s=CHECK_S)
            look = asyncio.create_task(checking, name=f"look at {server_name(use.server)}")
            self._looks[use.url] = look
        await asyncio.wait({look}, timeout=min(within_s, CHECK_S))
        return look.done() and not look.cancelled() and look.exception() is None and look.result()

    async def close(self) -> None:
        """Closes all clients, used or not."""
        for look in tuple(self._looks.values()):
            look.cancel()
        for connection in (*self._former, *self._newest.values()):
            await connection.client.close()
        self._former, self._newest = [], {}

    def _connection(self, use: UseServer) -> _Connection:
        found = self._newest.get(use.server)
        if found is None or found.url != use.url:
            if found is not None:
                self._former.append(found)
            found = _Connection(use.url, self._make_client(use.url, server_name(use.server)))
            self._newest[use.server] = found
        return found

    async def _close_former(self) -> None:
        idle = [c for c in self._former if not c.users]
        self._former = [c for c in self._former if c.users]
        for connection in idle:
            await connection.client.close()
