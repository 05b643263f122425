"""Routing: assigns servers to requests and orders waiting requests (pure).

For manager.py. A request is counted in when it is placed and out when it is done, its server restarts, or
its worker is lost: by its id, so that each happens once and counters can't drift. Requests that can't be
placed wait in order of arrival, those that continue an answer before those that begin one; ``place``
assigns free servers in this order. quarantine.py decides server health.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

MAX_GROUPS = 8192  # groups whose server is remembered; older ones are placed like new ones
MAX_ARRIVALS = 65536  # requests whose place in the order survives repetition
_CONTINUED_FIRST = 1 << 62


class RoutingPolicy(StrEnum):
    """Rule for choosing among servers. Names as in ``GserverManager.schedule_policy``."""

    ROUND_ROBIN = "round_robin"
    LEAST_REQUESTS = "least_requests"
    LEAST_TOKENS = "least_tokens"
    STICKY = "sticky"  # the server of the request's group; a new group: least_tokens


@dataclass(frozen=True, kw_only=True)
class RoutingRequest:
    """A request that needs a server. Fields as in ``rollout_messages.AskServer``."""

    rid: str
    group: str = ""
    num_tokens: int = 0
    min_version: int = 0
    former: int = -1  # the server that had it before
    worker: str = ""
    continues: bool = False


@dataclass(kw_only=True)
class ServerLoad:
    """State of one server for the router.

    Attributes:
        version: version of its weights; -1: unknown.
        unfit: why it gets no requests; empty: it is well.
        draining: gets no new requests for now.
        limit: maximum number of requests at a time; 0: any number.
    """

    version: int = -1
    unfit: str = "not registered"
    draining: bool = False
    limit: int = 0
    num_requests: int = 0
    num_tokens: int = 0

    @property
    def is_full(self) -> bool:
        return 0 < self.limit <= self.num_requests

    def refusal(self, request: RoutingRequest) -> str:
        """Returns why the server can't take the request, apart from capacity; empty if it can."""
        if self.unfit:
            return self.unfit
        if self.draining:
            return "is being updated"
        if self.version < request.min_version:
            return f"has version {self.version}, {request.min_version} is needed"
        return ""


@dataclass(frozen=True)
class _Placed:
    server: int
    num_tokens: int
    worker: str
    since_s: float


class Router:
    """Servers, their running requests, and waiting requests.

    Call ``place`` after everything that may have freed capacity; then no request waits that a server with
    capacity could take.

    Args:
        routes: worker → servers that its requests may use; a worker without an entry may use all.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        num_servers: int,
        routes: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        self.policy = policy
        self._routes = {worker: frozenset(servers) for worker, servers in (routes or {}).items()}
        self.servers: dict[int, ServerLoad] = {i: ServerLoad() for i in range(num_servers)}
        self.leaving: set[int] = set()  # leaving servers: only for workers without another
        self._placed: dict[str, _Placed] = {}
        self._waiting: dict[str, tuple[int, RoutingRequest]] = {}
        self._queue: list[tuple[int, str]] = []  # (arrival, rid), sorted
        self._arrivals: OrderedDict[str, int] = OrderedDict()
        self._num_arrivals = 0
        self._homes: OrderedDict[str, int] = OrderedDict()  # group → server
        self._last = -1  # position of round_robin

    # ---- requests -----------------------------------------------------------------------------

    def ask(self, request: RoutingRequest) -> None:
        """Queues a request; ``place`` assigns it a server.

        A repeated request keeps its place in the order and is counted out at its earlier server, which the
        caller has left.
        """
        self.done(request.rid)
        self.withdraw(request.rid)
        if request.rid not in self._arrivals:
            self._num_arrivals += 1
        # An answer that goes on has a cache that may still be there, and is nearer its end.
        place = self._num_arrivals - _CONTINUED_FIRST * request.continues
        arrival = self._arrivals.setdefault(request.rid, place)
        self._arrivals.move_to_end(request.rid)
        if len(self._arrivals) > MAX_ARRIVALS:
            self._arrivals.popitem(last=False)
        self._waiting[request.rid] = (arrival, request)
        insort(self._queue, (arrival, request.rid))

    def place(self, *, now_s: float) -> list[tuple[str, int]]:
        """Assigns servers to waiting requests in their order; returns (request id, server) of each."""
        granted: list[tuple[str, int]] = []
        open_ = {i: s.version for i, s in self.servers.items() if self._is_open(s)}
        newest = max(open_.values(), default=-1)
        for _, rid in list(self._queue) if open_ else ():
            request = self._waiting[rid][1]
            if request.min_version > newest:  # cheap: thousands may wait for new weights
                continue
            able = [i for i in open_ if not self._refusal(request, i)]
            if not able:
                continue
            chosen = self._choose(request, able)
            self.withdraw(rid)
            self._count_in(request, chosen, now_s)
            granted.append((rid, chosen))
            if self.servers[chosen].is_full:
                del open_[chosen]
                if not open_:
                    break
                newest = max(open_.values())
        return granted

    def withdraw(self, rid: str) -> bool:
        """Removes a waiting request; True if it was waiting. It keeps its place in case it is repeated."""
        if (waiting := self._waiting.pop(rid, None)) is None:
            return False
        del self._queue[bisect_left(self._queue, (waiting[0], rid))]
        return True

    def done(self, rid: str, server: int = -1) -> bool:
        """Counts a request out; False if it was not counted in at this server."""
        placed = self._placed.get(rid)
        if placed is None or server not in (-1, placed.server):
            return False
        del self._placed[rid]
        load = self.servers[placed.server]
        load.num_requests -= 1
        load.num_tokens -= placed.num_tokens
        return True

    def worker_lost(self, worker: str) -> list[str]:
        """Counts out all requests of a lost worker; returns the ids of its waiting ones."""
        for rid in [rid for rid, placed in self._placed.items() if placed.worker == worker]:
            self.done(rid)
        waiting = [rid for rid, (_, request) in self._waiting.items() if request.worker == worker]
        for rid in waiting:
            self.withdraw(rid)
        return waiting

    def forget_idle(self, server: int, *, before_s: float) -> int:
        """Counts out requests placed before a time at a server that reports none; returns their number.

        Their callers never reached it.
        """
        old = [
            rid
            for rid, placed in self._placed.items()
            if placed.server == server and placed.since_s < before_s
        ]
        for rid in old:
            self.done(rid)
        return len(old)

    # ---- servers --------------------------------------------------------------------------------

    def restarted(self, server: int, *, why: str) -> None:
        """Clears the requests of a server that was restarted as a new process."""
        for rid in [rid for rid, placed in self._placed.items() if placed.server == server]:
            self.done(rid)
        self.servers[server] = ServerLoad(unfit=why)

    def set_unfit(self, server: int, why: str) -> None:
        """Marks a server as unavailable with a reason; empty marks it as available."""
        self.servers[server].unfit = why

    def allow(self, worker: str, servers: Collection[int]) -> None:
        """Restricts a worker's requests to these servers."""
        self._routes[worker] = frozenset(servers)

    def is_routed(self, worker: str) -> bool:
        """True if the worker's requests are restricted to some servers."""
        return worker in self._routes

    def removed(self, server: int) -> None:
        """Removes a server for good, with its counted requests."""
        if server in self.servers:
            self.restarted(server, why="has left")
            del self.servers[server]
        homes = self._homes.items()
        self._homes = OrderedDict((group, home) for group, home in homes if home != server)

    # ---- views ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests without a server."""
        return len(self._waiting)

    @property
    def running(self) -> Mapping[int, int]:
        """Number of counted requests, by server."""
        return {i: server.num_requests for i, server in self.servers.items()}

    def is_needed(self, server: int, workers: Collection[str]) -> bool:
        """True if one of these workers has no other server than this one, or only leaving ones."""
        return any(
            server in self._allowed(worker) and self._has_only_leaving(worker) for worker in workers
        )

    def is_in_line(self, request: RoutingRequest, *, updating: Collection[int]) -> bool:
        """True if a healthy server will take the request: when it has room, or the weights that it gets.

        Args:
            updating: servers that get new weights now.
        """
        for index in self._allowed(request.worker):
            server = self.servers.get(index)
            if server is None or server.unfit:
                continue
            if index in self.leaving and not self._has_only_leaving(request.worker):
                continue
            if server.draining or index in updating:
                return True
            if server.is_full and server.version >= request.min_version:
                return True
        return False

    def why_not(self, request: RoutingRequest) -> str:
        """Describes what keeps each server from taking the request."""
        reasons = []
        for index, server in sorted(self.servers.items()):
            full = f"is full ({server.num_requests} of {server.limit})" if server.is_full else ""
            why = self._refusal(request, index) or full or "has room"
            reasons.append(f"generation_server/{index}: {why}")
        return "; ".join(reasons) or "there are no generation servers"

    # ---- choice ---------------------------------------------------------------------------------

    def _refusal(self, request: RoutingRequest, server: int) -> str:
        if server not in self._allowed(request.worker):
            return f"is not for {request.worker}"
        if server in self.leaving and not self._has_only_leaving(request.worker):
            return "is leaving"
        return self.servers[server].refusal(request)

    def _allowed(self, worker: str) -> Collection[int]:
        return self._routes.get(worker, self.servers.keys())

    def _has_only_leaving(self, worker: str) -> bool:
        return all(server in self.leaving for server in self._allowed(worker))

    @staticmethod
    def _is_open(server: ServerLoad) -> bool:
        return not (server.unfit or server.draining or server.is_full)

    def _choose(self, request: RoutingRequest, able: list[int]) -> int:
        if request.former in able:  # its tokens may still be cached there
            return request.former
        if self.policy is RoutingPolicy.ROUND_ROBIN:
            self._last = min((i for i in able if i > self._last), default=min(able))
            return self._last
        if self.policy is RoutingPolicy.LEAST_REQUESTS:
            return min(able, key=lambda i: (self.servers[i].num_requests, i))
        if self.policy is RoutingPolicy.STICKY:
            return self._at_home(request, able)
        return self._lightest(able)

    def _lightest(self, able: list[int]) -> int:
        return min(
            able, key=lambda i: (self.servers[i].num_tokens, self.servers[i].num_requests, i)
        )

    def _at_home(self, request: RoutingRequest, able: list[int]) -> int:
        home = self._homes.get(request.group)
        if home in able:
            self._homes.move_to_end(request.group)
            return home
        chosen = self._lightest(able)
        # A full home stays the home: the rest of the group can still reuse its prefix there.
        if request.group and (home is None or self._refusal(request, home)):
            self._homes[request.group] = chosen
            if len(self._homes) > MAX_GROUPS:
                self._homes.popitem(last=False)
        return chosen

    def _count_in(self, request: RoutingRequest, server: int, now_s: float) -> None:
        self._placed[request.rid] = _Placed(server, request.num_tokens, request.worker, now_s)
        load = self.servers[server]
        load.num_requests += 1
        load.num_tokens += request.num_tokens
