"""Client of the generation-server manager, which may be restarted at any time.

A request that a dead manager did not answer is sent to the next one, and each new manager gets the newest
weights at once. A version is announced as soon as it exists, whatever became of the previous one: a slow
server does not keep others from newer weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, Unpack

import msgspec

from realsys.api.errors import RolloutError, WaitTimeout, WorkerLost
from realsys.runtime.first_error import first_error
from realsys.transport import rollout_messages as rm
from realsys.transport.channel import RequestClient, client_context
from realsys.transport.curve_keys import ChannelIdentity
from realsys.transport.generation_messages import WeightSource
from realsys.trial.records import WorkerRecord

logger = logging.getLogger(__name__)

MANAGER = "gserver_manager/0"
FIND_S = 120.0
FIND_LOOK_S = 3.0
UPDATE_TIMEOUT_S = 1800.0
RETRY_S = 0.5
LOOK_S = 10.0
NONE_WELL_S = 300.0


class GserverManagerClient:
    """Use as ``async with``; within one event loop.

    Args:
        find: blocks until the manager has registered, and returns its record.
        wait_limit_s: for how long all servers may be away that were there.
    """

    def __init__(
        self,
        find: Callable[[float], WorkerRecord],
        *,
        sender: str,
        wait_limit_s: float = NONE_WELL_S,
        **identity: Unpack[ChannelIdentity],
    ) -> None:
        self._find, self._wait_limit_s = find, wait_limit_s
        self._who: dict[str, Any] = {"sender": sender, **identity}
        self._context = client_context()
        self._client: RequestClient | None = None
        self._record: WorkerRecord | None = None
        self._connecting = asyncio.Lock()
        self._source: WeightSource | None = None
        self._news = asyncio.Condition()
        self._announced: tuple[int, int] | None = None  # version, pid of the manager
        self._at: rm.ServersAt | None = None
        self._closing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._closing is not None:
            await self._closing
        if self._client is not None:
            await self._client.close()
            self._client = None
        self._context.term()

    # ---- weights ----------------------------------------------------------------------------

    async def bring(self, source: WeightSource) -> None:
        """Sets the weights that the servers shall have from now on. Returns at once."""
        async with self._news:
            self._source = source
            self._news.notify_all()

    @property
    def newest_at_servers(self) -> rm.ServersAt | None:
        """Returns the result of the last finished update."""
        return self._at

    async def run(self) -> None:
        """Announces each new source to the manager, and the newest to each new manager; until cancelled."""
        async with first_error(), asyncio.TaskGroup() as telling:
            while True:
                async with self._news:
                    try:
                        async with asyncio.timeout(RETRY_S):
                            await self._news.wait_for(self._is_news)
                    except TimeoutError:
                        continue
                    source = self._source
                assert source is not None
                try:
                    client, pid = await self._connected()
                except WaitTimeout as error:
                    logger.warning("no manager, again soon error=%s", error.what)
                    continue
                self._announced = (source.version, pid)
                what = f"weights of version {source.version}"
                telling.create_task(self._announce(client, source, what), name=what)

    async def _announce(self, client: RequestClient, source: WeightSource, what: str) -> None:
        """Announces a source and waits until all servers have it. If it fails, the newest is announced
        again."""
        body = rm.NewWeights(source=msgspec.msgpack.encode(source))
        try:
            self._at = await client.call(body, timeout_s=UPDATE_TIMEOUT_S, what=what)
        except (WorkerLost, WaitTimeout) as error:
            logger.warning("manager not reached, again soon error=%s", error.what)
            await asyncio.sleep(RETRY_S)
            self._announced = None

    async def watch(self) -> None:
        """Watches the servers until cancelled. Raises RolloutError if none has been healthy for
        ``wait_limit_s``; for ``NONE_WELL_S`` if none ever was: that is a mistake rather than an outage."""
        clock = asyncio.get_running_loop().time
        well_s, limit_s, before = clock(), NONE_WELL_S, ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                view: rm.ManagerView = await self.call(
                    rm.AskManager(), timeout_s=limit_s, what="how the servers do"
                )
            except WaitTimeout as error:
                raise RolloutError(error.what, where=MANAGER, fix=error.fix) from error
            if view.versions.keys() - view.sick.keys() or not view.sick:
                well_s = clock()
                if view.versions:
                    limit_s = max(NONE_WELL_S, self._wait_limit_s)
                continue
            problems = "; ".join(f"generation_server/{i}: {why}" for i, why in view.sick.items())
            if problems != before:
                logger.warning("no healthy generation server reason=%s", problems)
            before = problems
            if clock() - well_s > limit_s:
                raise RolloutError(
                    f"no generation server has been healthy for {limit_s:g} s: {problems}",
                    where=MANAGER,
                    fix="see their logs (realsys logs TRIAL generation_server); then realsys resume",
                )

    def _is_news(self) -> bool:
        if self._source is None:
            return False
        pid = self._record.pid if self._record is not None and self._client is not None else -1
        return self._announced != (self._source.version, pid)

    # ---- calls ------------------------------------------------------------------------------

    async def call(self, body: Any, *, timeout_s: float, what: str) -> Any:
        """Sends a request until a manager answers. Raises WaitTimeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"no {MANAGER} answered {what} in {timeout_s:g} s",
                    where=MANAGER,
                    fix=f"see its log: realsys logs TRIAL {MANAGER}",
                )
            try:
                client, _ = await self._connected()
                return await client.call(body, timeout_s=left, what=what)
            except WorkerLost as error:
                logger.warning("manager lost, asking the next error=%s", error.what)
                await asyncio.sleep(RETRY_S)

    def fail(self, reason: str) -> None:
        """Notes that the manager has ended: waiting calls are repeated with the next one."""
        if self._client is not None:
            self._client.fail(reason)
            client, self._client = self._client, None
            self._closing = asyncio.ensure_future(client.close())

    async def _connected(self) -> tuple[RequestClient, int]:
        """Returns the connection to the present manager, and its pid."""
        async with self._connecting:
            client = self._client or await self._connect()
            return client, self._record.pid if self._record is not None else 0

    async def _connect(self) -> RequestClient:
        self._record = record = await self._find_other(self._record)
        self._client = RequestClient(
            record.control,
            peer_name=MANAGER,
            reply_type=rm.FromManager,
            context=self._context,
            **self._who,
        ).open()
        return self._client

    async def _find_other(self, gone: WorkerRecord | None) -> WorkerRecord:
        """Returns the registered manager, unless it is the one that has ended."""
        deadline = time.monotonic() + FIND_S
        while True:
            # In short looks: a thread can't be cancelled, and the master's end would wait for it.
            with suppress(WaitTimeout):
                record = await asyncio.to_thread(self._find, FIND_LOOK_S)
                if gone is None or (record.pid, record.control) != (gone.pid, gone.control):
                    return record
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{MANAGER} did not register in {FIND_S:g} s",
                    where=MANAGER,
                    fix=f"see its log: realsys logs TRIAL {MANAGER}",
                )
            await asyncio.sleep(RETRY_S)
