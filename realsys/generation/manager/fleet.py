"""Registered generation servers: a client and the health state of each.

Keeps routing.py (availability), quarantine.py (health, next check) and the record consistent: every
event of a
server goes through here. Used in the manager's event loop; makes no decisions and sends nothing to servers
(manager.py and updates.py do).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from realsys.api.errors import RealsysError
from realsys.generation.manager.manager_record import ManagerEvent
from realsys.generation.manager.quarantine import Condition, Quarantine
from realsys.generation.manager.routing import Router
from realsys.transport.generation_messages import (
    GenerationClient,
    ServerAddress,
    ServerInfo,
    WeightsTaken,
)

logger = logging.getLogger(__name__)

# Requests held beyond those running, so that a free row has its next request at once.
LIMIT_FACTOR = 2.0
CLOSE_S = 5.0
MakeClient = Callable[[ServerAddress], GenerationClient]


class Recorder(Protocol):
    """Receiver of events (manager_record.py)."""

    def write(self, event: ManagerEvent, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RegisteredServer:
    """A server's registration; ``incarnation`` identifies its process."""

    address: ServerAddress
    incarnation: str


@dataclass(eq=False, kw_only=True)
class Member:
    """One server process.

    Attributes:
        lock: held while its weights are updated.
        num_updates: number of updates started.
        taking: version that it may be reading now; -1: none. It is kept after an update without an answer.
        taken: its reply to the last update.
        listed: True while its registration exists.
    """

    registered: RegisteredServer
    client: GenerationClient
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    checking: bool = False
    num_updates: int = 0
    taking: int = -1
    taken: WeightsTaken | None = None
    listed: bool = True

    @property
    def index(self) -> int:
        return self.registered.address.index

    @property
    def name(self) -> str:
        return f"generation_server/{self.index}"


@dataclass(eq=False, repr=False)
class Fleet:
    """All servers by index.

    Args:
        make_client: makes the client of a server that has registered; closed by ``close_left``.
        server_limit: maximum number of requests at one server; 0: ``LIMIT_FACTOR`` times its
            ``max_running``.
        on_change: called when a server may have become available for requests, or is due for a check.

    Attributes:
        like: added server → the planned server with the same weight source.
    """

    router: Router
    quarantine: Quarantine
    _: KW_ONLY
    make_client: MakeClient
    record: Recorder
    server_limit: int = 0
    on_change: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.like: dict[int, int] = {}
        self._left: list[Member] = []

    # ---- membership ------------------------------------------------------------------------

    def registered(self, found: Mapping[int, RegisteredServer]) -> None:
        """Applies all current registrations. A new process is checked before it gets requests.

        A missing one is only checked: leases also expire if the store was unavailable.
        """
        for index, one in found.items():
            known = self.members.get(index)
            if known is None or known.registered != one:
                self._joins(one, known)
            else:
                known.listed = True
        for index, member in self.members.items():
            if index not in found and member.listed:
                member.listed = False
                self.quarantine.schedule_check(index, self.now_s())
        for index in self.router.leaving - found.keys() & self.router.servers.keys():
            self._leaves(index)
        self.on_change()

    def _leaves(self, index: int) -> None:
        """Removes a leaving server whose registration has disappeared."""
        if index in self.members:
            self._left.append(self.members.pop(index))
            self.quarantine.left(index)
        self.router.removed(index)
        logger.info("server left server=%d", index)
        self.record.write(ManagerEvent.SERVER_LEFT, server=index)

    def _joins(self, one: RegisteredServer, former: Member | None) -> None:
        index = one.address.index
        if former is not None:
            self._left.append(self.members.pop(index))
            self.quarantine.left(index)
        try:
            client = self.make_client(one.address)
        except RealsysError as error:  # one bad registration must not affect the others
            logger.warning("server can't be used server=%d error=%s", index, error.what)
            self.router.restarted(index, why=f"can't be used: {error.what}")
            return
        self.members[index] = Member(registered=one, client=client)
        self.router.restarted(index, why="is being checked")
        self.quarantine.joined(index, now_s=self.now_s())
        logger.info("server registered server=%d again=%s", index, former is not None)

    def is_current(self, member: Member) -> bool:
        """False once another process has replaced the member: results about it are then ignored."""
        return self.members.get(member.index) is member

    async def close_left(self, *, everyone: bool = False) -> None:
        """Closes clients of servers that were replaced, or all."""
        left, self._left = self._left + list(self.members.values()) * everyone, []
        for member in left:
            # A failing close is ignored: the server's process has ended.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await member.client.close()

    # ---- health -----------------------------------------------------------------------------

    def seen(self, member: Member, info: ServerInfo) -> None:
        """Stores a server's information about itself."""
        load = self.router.servers[member.index]
        load.version = info.weight_version
        load.limit = self.server_limit or math.ceil(LIMIT_FACTOR * info.max_running)

    def took(self, member: Member, taken: WeightsTaken) -> None:
        """Records that the server has new weights."""
        member.taken = taken
        self.router.servers[member.index].version = taken.version
        self.on_change()

    def drains(self, member: Member, on: bool) -> None:
        """Stops assigning new requests to a server, or resumes."""
        self.router.servers[member.index].draining = on
        self.on_change()

    def sick(self, member: Member, why: str) -> None:
        """Records a failed check or update."""
        if self.quarantine.failed(member.index, why, now_s=self.now_s()):
            self._left_out(member, why)

    def request_broke(self, member: Member, why: str) -> None:
        """Records a request that failed at the server."""
        if self.quarantine.request_broke(member.index, why, now_s=self.now_s()):
            self._left_out(member, why)
        self.on_change()

    def _left_out(self, member: Member, why: str) -> None:
        self.router.set_unfit(member.index, f"is sick: {why}")
        logger.warning("server quarantined server=%d reason=%s", member.index, why)
        self.record.write(ManagerEvent.SERVER_SICK, server=member.index, why=why)

    def well(self, member: Member) -> None:
        """Records a passed check: the server gets requests."""
        former = self.quarantine.passed(member.index, now_s=self.now_s())
        if former is Condition.WELL:
            return
        self.router.set_unfit(member.index, "")
        version = self.version(member)
        logger.info("server available server=%d version=%d", member.index, version)
        event = ManagerEvent.SERVER_BACK if former is Condition.SICK else ManagerEvent.SERVER_UP
        self.record.write(event, server=member.index, version=version)
        self.on_change()

    # ---- views ------------------------------------------------------------------------------

    def version(self, member: Member) -> int:
        """Version of the server's weights; -1 if unknown."""
        return self.router.servers[member.index].version

    @property
    def versions(self) -> dict[int, int]:
        """Weight version of each server (-1 if unknown)."""
        return {index: self.version(member) for index, member in self.members.items()}

    @property
    def updating(self) -> set[int]:
        """Servers that get new weights now."""
        return {index for index, member in self.members.items() if member.lock.locked()}

    @property
    def taking(self) -> dict[int, int]:
        """Version of the weights that each server may be reading now."""
        return {i: member.taking for i, member in self.members.items() if member.taking >= 0}

    @property
    def well_members(self) -> list[Member]:
        """Members that get requests, by index."""
        sick = self.quarantine.sick
        return [member for index, member in sorted(self.members.items()) if index not in sick]

    @property
    def sick_members(self) -> dict[int, str]:
        """Reasons of servers that should serve but get no requests, by server."""
        servers = self.router.servers.items()
        missing = {i: server.unfit for i, server in servers if i not in self.members}
        return {**missing, **self.quarantine.sick}

    @staticmethod
    def now_s() -> float:
        """Time of the event loop's clock, the only one used here."""
        return asyncio.get_running_loop().time()


def error_line(error: Exception) -> str:
    """Formats an error as one line."""
    if isinstance(error, RealsysError):
        text = error.what
    elif isinstance(error, TimeoutError):
        text = "no answer in time"
    else:
        text = f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:200]
