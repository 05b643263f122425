"""The master's connections to all model workers: numbers ordered requests, awaits replies.

Every ordered request of a worker gets the next number of that worker, and all requests of one call are
numbered together, without an await in between. So any two calls reach their common workers in the same
order, and calls on overlapping workers can't deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from realsys.runtime.first_error import first_error
from realsys.transport.channel import RequestClient, client_context
from realsys.transport.curve_keys import ChannelIdentity
from realsys.transport.worker_requests import Exit, Reply
from realsys.trial.records import WorkerRecord


class RequestOrder:
    """Assigns the next number of each worker (pure)."""

    def __init__(self, num_workers: int) -> None:
        self._next = [0] * num_workers

    def number(self, requests: Mapping[int, Callable[..., Any]]) -> dict[int, Any]:
        """Returns worker → its request with ``order`` filled in."""
        numbered = {}
        for worker, make in requests.items():
            numbered[worker] = make(order=self._next[worker])
            self._next[worker] += 1
        return numbered


class ModelWorkers:
    """All model workers, by index. Use as ``async with``."""

    def __init__(
        self,
        records: Sequence[WorkerRecord],
        *,
        sender: str,
        **identity: Unpack[ChannelIdentity],
    ) -> None:
        self.records = list(records)
        self._context = client_context(len(self.records))
        self._clients = [
            RequestClient(
                record.control,
                peer_name=record.worker,
                sender=sender,
                reply_type=Reply,
                context=self._context,
                **identity,
            )
            for record in records
        ]
        self._order = RequestOrder(len(self._clients))

    def __len__(self) -> int:
        return len(self._clients)

    async def __aenter__(self) -> ModelWorkers:
        for client in self._clients:
            client.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in self._clients:
            await client.close()
        self._context.term()

    async def call(
        self, requests: Mapping[int, Callable[..., Any]], *, timeout_s: float, what: str
    ) -> dict[int, Any]:
        """Sends one ordered request to each named worker; returns their replies by worker.

        Args:
            requests: worker index → the request but for its ``order`` (functools.partial).
        Raises:
            what the first failing worker raised; WaitTimeout naming worker and ``what``.
        """
        return await self.exchange(self.number(requests), timeout_s=timeout_s, what=what)

    def number(self, requests: Mapping[int, Callable[..., Any]]) -> dict[int, Any]:
        """Numbers each request in its worker's order. Numbered requests must be sent with ``exchange``."""
        return self._order.number(requests)

    async def exchange(
        self, bodies: Mapping[int, Any], *, timeout_s: float, what: str
    ) -> dict[int, Any]:
        """Sends numbered requests; returns their replies by worker. Raises as ``call``."""
        async with first_error(), asyncio.TaskGroup() as group:
            tasks = {
                worker: group.create_task(
                    self._clients[worker].call(body, timeout_s=timeout_s, what=what),
                    name=f"{what} on {self.records[worker].worker}",
                )
                for worker, body in bodies.items()
            }
        return {worker: task.result() for worker, task in tasks.items()}

    async def call_all(self, make: Callable[..., Any], *, timeout_s: float, what: str) -> list[Any]:
        """Sends the same ordered request to every worker; returns replies in order of index."""
        everyone = dict.fromkeys(range(len(self)), make)
        replies = await self.call(everyone, timeout_s=timeout_s, what=what)
        return [replies[worker] for worker in range(len(self))]

    async def tell(self, workers: Sequence[int], body: Any, *, timeout_s: float, what: str) -> None:
        """Sends one unordered request to each of ``workers``."""
        await self.exchange(dict.fromkeys(workers, body), timeout_s=timeout_s, what=what)

    def fail(self, worker: str, reason: str) -> None:
        """Marks ``worker`` as ended: fails all calls that wait for it."""
        for record, client in zip(self.records, self._clients, strict=True):
            if record.worker == worker:
                client.fail(reason)

    async def say_exit(self, *, timeout_s: float) -> None:
        """Makes every worker exit."""
        await self.tell(range(len(self)), Exit(), timeout_s=timeout_s, what="exit")
