"""Updates servers to the newest weights: all at once, or a share of them at a time.

For manager.py (new weights were published, and a new server is updated before it gets
requests). Each server has one update at a time, always to the newest source; queued older ones are
skipped. A server that fails is quarantined and its requests are aborted; the others continue.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from enum import StrEnum
from typing import Any

from realsys.api.errors import InternalError, WaitTimeout
from realsys.generation.manager.fleet import Fleet, Member, error_line
from realsys.generation.manager.manager_record import ManagerEvent
from realsys.runtime.transfer_time import transfer_time_s
from realsys.transport.generation_messages import WeightSource
from realsys.transport.rollout_messages import ServersAt

logger = logging.getLogger(__name__)

GRACE_S = 5.0  # margin over the client's own deadline
ABORT_S = 5.0


class UpdateMode(StrEnum):
    """Update modes. Names as in ``GserverManager.update_mode``."""

    ALL_AT_ONCE = "all_at_once"
    ROLLING = "rolling"


def waves(servers: Sequence[int], *, mode: UpdateMode, share: float) -> list[list[int]]:
    """Groups servers that are updated together, in order, each with ``share`` of all (pure)."""
    if not servers:
        return []
    size = (
        len(servers) if mode is UpdateMode.ALL_AT_ONCE else max(1, math.floor(share * len(servers)))
    )
    return [list(servers[i : i + size]) for i in range(0, len(servers), size)]


class Updates:
    """Holds the newest source and updates servers to it.

    Args:
        timeout_s: time limit for one server, extended for large weights.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        mode: UpdateMode = UpdateMode.ALL_AT_ONCE,
        share: float = 0.25,
        timeout_s: float = 120.0,
    ) -> None:
        self._fleet, self._mode, self._share, self._timeout_s = fleet, mode, share, timeout_s
        self.newest: WeightSource | None = None
        self._wave = asyncio.Lock()  # rolling: held while a share of the servers is updated
        self._rounds: list[set[Member]] = []  # started updates: servers still to be updated

    def _take(self, source: WeightSource) -> None:
        """Adopts a source as the newest, unless a newer one is known."""
        if self.newest is not None and source.version < self.newest.version:
            logger.info("weights skipped version=%d newest=%d", source.version, self.newest.version)
            return
        self.newest = source
        now_s = self._fleet.now_s()
        for index in self._fleet.quarantine.sick:  # the source may have been at fault
            self._fleet.quarantine.schedule_check(index, now_s)
        self._fleet.on_change()

    async def bring_all(self, source: WeightSource) -> ServersAt:
        """Updates all available servers to this version or a newer one; returns the result when done."""
        self._take(source)
        fleet, began_s = self._fleet, self._fleet.now_s()
        members = {member.index: member for member in fleet.well_members}
        plan = waves(list(members), mode=self._mode, share=self._share)
        fleet.record.write(ManagerEvent.UPDATE_START, version=source.version, servers=list(members))
        to_come = set(members.values())
        self._rounds.append(to_come)
        try:
            for wave in plan:
                async with self._one_share(), asyncio.TaskGroup() as group:
                    for index in wave:
                        to_come.discard(members[index])
                        name = f"update generation_server/{index} to {source.version}"
                        group.create_task(self.bring_up(members[index]), name=name)
        finally:
            self._rounds = [others for others in self._rounds if others is not to_come]
        seconds = fleet.now_s() - began_s
        taken = [m.taken for m in members.values() if m.taken and m.taken.version >= source.version]
        paused_s = max((t.paused_s for t in taken), default=0.0)
        sick = fleet.sick_members
        fleet.record.write(
            ManagerEvent.UPDATE_END,
            version=source.version,
            seconds=round(seconds, 3),
            paused_s=round(paused_s, 3),
            num_bytes=sum(t.num_bytes for t in taken),
            failed={str(i): why for i, why in sick.items() if i in members},
        )
        logger.info("servers updated version=%d seconds=%.2f", source.version, seconds)
        return ServersAt(
            versions=fleet.versions,
            sick=sick,
            seconds=seconds,
            paused_s=paused_s,
            num_bytes=sum(t.num_bytes for t in taken),
        )

    def has_turn(self, member: Member) -> bool:
        """True if a running update will reach this server by itself."""
        return any(member in to_come for to_come in self._rounds)

    def _one_share(self) -> AbstractAsyncContextManager[Any]:
        """Serialises rolling updates, if newer weights arrive during one."""
        return self._wave if self._mode is UpdateMode.ROLLING else nullcontext()

    async def bring_up(self, member: Member) -> bool:
        """Updates one server to the newest source; False if it failed (and is sick) or was replaced."""
        async with member.lock:
            if not self._is_behind(member):
                return self._fleet.is_current(member)
            self._drain(member, True)
            try:
                is_up = await self._up_to_newest(member)
            finally:
                # Only now: a failed server must be marked sick before it could get a request.
                self._drain(member, False)
        if not is_up and self._fleet.is_current(member):
            await self._send_away(member)
        return is_up and self._fleet.is_current(member)

    async def _up_to_newest(self, member: Member) -> bool:
        while self._is_behind(member) and self.newest is not None:
            source = self.newest
            why = await self._update(member, source)
            if not self._fleet.is_current(member):
                return False
            if why and self.newest is source:  # otherwise the failed version is no longer needed
                self._fleet.sick(member, f"update to version {source.version} failed: {why}")
                return False
        return True

    async def _update(self, member: Member, source: WeightSource) -> str:
        """Updates one server; returns why it failed, empty if it did not."""
        member.num_updates += 1
        member.taking = source.version
        timeout_s = transfer_time_s(source.num_bytes, at_least_s=self._timeout_s)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                taken = await member.client.update_weights(
                    source.of_server(self._fleet.like.get(member.index, member.index)),
                    timeout_s=timeout_s,
                )
            if taken.version < source.version:
                raise InternalError(f"it took version {taken.version}", where=member.name)
        # After any error: the others continue, and this one is tried again.
        except Exception as error:
            if not isinstance(error, TimeoutError | WaitTimeout):  # else it may still be at it
                member.taking = -1
            return error_line(error)
        member.taking = -1
        if self._fleet.is_current(member):
            self._fleet.took(member, taken)
        return ""

    def _is_behind(self, member: Member) -> bool:
        if self.newest is None or not self._fleet.is_current(member):
            return False
        return self._fleet.version(member) < self.newest.version

    def _drain(self, member: Member, on: bool) -> None:
        if self._mode is UpdateMode.ROLLING and self._fleet.is_current(member):
            self._fleet.drains(member, on)

    async def _send_away(self, member: Member) -> None:
        """Aborts a server's requests with their tokens so far; their callers request another server."""
        try:
            async with asyncio.timeout(ABORT_S):
                await member.client.abort(every=True)
        except Exception as error:  # then they notice by their own deadline
            logger.info("requests not ended server=%d error=%s", member.index, error_line(error))
