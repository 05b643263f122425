"""The manager's service: assigns servers to requests, updates servers' weights, and monitors servers.

    rollout workers ─ AskServer, DoneWith ─▶ Manager ─ checks, updates, goodbyes ─▶ generation servers
    master ─ NewWeights, AskManager, Leave ─▶

One event loop owns all state. No state must survive a restart: a restarted manager queries the servers'
weight versions, gets the newest source from the master, starts with zero counters, and ignores the end of
requests that it does not know.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from realsys.generation.manager.fleet import Fleet, Member, error_line
from realsys.generation.manager.manager_record import ManagerEvent
from realsys.generation.manager.registrations import Registrations
from realsys.generation.manager.routing import RoutingRequest
from realsys.generation.manager.updates import Updates
from realsys.runtime.progress import tick
from realsys.transport import rollout_messages as rm
from realsys.transport.codec import decode
from realsys.transport.generation_messages import WeightSource
from realsys.worker.live_scaling import DrainDeadlines, Scaling, index_of

logger = logging.getLogger(__name__)

SERVER = "generation_server/"
MAX_WAIT_S = 300.0  # limit of one AskServer, whatever it requests
IDLE_S = 1.0  # the loop wakes and ticks at least this often
DISMISS_EVERY_S = 5.0  # a dismissed server that still exists is dismissed again


Dismiss = Callable[[int], Coroutine[Any, Any, None]]


class Manager:
    """Handles ``ToManager`` messages (``handle``) and monitors the servers (``run``).

    Args:
        dismiss: requests a server, by its index, to finish its requests and end.
    """

    def __init__(
        self,
        fleet: Fleet,
        updates: Updates,
        *,
        dismiss: Dismiss,
    ) -> None:
        self.fleet, self.updates, self._router = fleet, updates, fleet.router
        self._dismiss, self._leaving_servers = dismiss, DrainDeadlines()
        self._dismiss_at_s: dict[int, float] = {}
        self._answers: dict[str, asyncio.Future[rm.UseServer]] = {}  # futures of waiting requests
        self._rollout_workers: dict[str, str] = {}
        self._changed, self._leaving = asyncio.Event(), False
        fleet.on_change = self._servers_changed

    # ---- messages ---------------------------------------------------------------------------

    async def handle(self, request: rm.ToManager) -> rm.FromManager:
        """Returns the reply to one message. Raises ProtocolError for weights that can't be read."""
        tick()
        if isinstance(request, rm.AskServer):
            return await self._ask_server(request)
        if isinstance(request, rm.DoneWith):
            return self._done_with(request)
        if isinstance(request, rm.NewWeights):
            return await self.updates.bring_all(decode(request.source, WeightSource))
        if isinstance(request, rm.AskManager):
            return self.view()
        self.leave()
        return rm.Accepted()

    async def _ask_server(self, ask: rm.AskServer) -> rm.UseServer:
        asked = RoutingRequest(
            rid=ask.rid,
            group=ask.group,
            num_tokens=ask.num_tokens,
            min_version=ask.min_version,
            former=ask.server,
            worker=ask.worker,
            continues=ask.continues,
        )
        self._send_reply(ask.rid, rm.UseServer(why="it was asked again"))
        answer: asyncio.Future[rm.UseServer] = asyncio.get_running_loop().create_future()
        self._answers[ask.rid] = answer
        self._router.ask(asked)
        self._assign_servers()
        try:
            # Not wait_for: a server that is assigned at the deadline must not be lost.
            await asyncio.wait({answer}, timeout=min(max(ask.wait_s, 0.0), MAX_WAIT_S))
            if answer.done():
                return answer.result()
            updating = self.fleet.updating
            in_line = self._router.is_in_line(asked, updating=updating)
            return rm.UseServer(why=self._router.why_not(asked), in_line=in_line)
        finally:
            if self._answers.get(ask.rid) is answer:
                del self._answers[ask.rid]
                self._router.withdraw(ask.rid)

    def _done_with(self, done: rm.DoneWith) -> rm.Accepted:
        if done.server < 0 and self._router.withdraw(done.rid):
            self._send_reply(done.rid, rm.UseServer(why="it was given up"))
        if self._router.done(done.rid, done.server) and done.server in self.fleet.members:
            if done.broken:
                self.fleet.request_broke(self.fleet.members[done.server], done.why)
            # Otherwise it was cancelled, which is no evidence about the server.
            elif done.num_new_tokens:
                self.fleet.quarantine.request_ended(done.server)
        self._assign_servers()
        return rm.Accepted()

    def view(self) -> rm.ManagerView:
        """Status of the servers."""
        return rm.ManagerView(
            versions=self.fleet.versions,
            sick=self.fleet.sick_members,
            running=self._router.running,
            waiting=self._router.num_waiting,
            taking=self.fleet.taking,
        )

    def leave(self) -> None:
        """Makes ``run`` end."""
        self._leaving = True
        self._changed.set()

    # ---- what changes ---------------------------------------------------------------------------

    def registered(self, found: Registrations) -> None:
        """Updates the fleet from all current registrations (registrations.py)."""
        former, self._rollout_workers = self._rollout_workers, dict(found.rollout_workers)
        for worker, incarnation in former.items():
            if self._rollout_workers.get(worker) != incarnation:
                self._worker_lost(worker)
        if found.scaling is not None:
            self._scaled(found.scaling)
        self.fleet.registered(found.servers)

    def _scaled(self, scaling: Scaling) -> None:
        """Applies scaling: added workers (with routes, maker i is server i and rollout worker i),
        leaving ones.
        """
        for worker, like in scaling.added.items():
            if worker.startswith(SERVER):
                self.fleet.like[index_of(worker)] = index_of(like)
            elif self._router.is_routed(like):
                self._router.allow(worker, {index_of(worker)})
        for worker in self._leaving_servers.update(scaling, now_s=self.fleet.now_s()):
            if worker.startswith(SERVER):
                self._router.leaving.add(index_of(worker))
                logger.info("server leaving server=%d deadline=%s", index_of(worker), scaling.by)
                self.fleet.record.write(ManagerEvent.SERVER_LEAVING, server=index_of(worker))

    def _worker_lost(self, worker: str) -> None:
        """Frees what a lost worker held. If it was only cut off from the store, its servers briefly
        exceed their limit.
        """
        for rid in self._router.worker_lost(worker):
            self._send_reply(rid, rm.UseServer(why=f"{worker} was lost"))
        logger.info("rollout worker lost worker=%s", worker)
        self.fleet.record.write(ManagerEvent.WORKER_LOST, worker=worker)

    def _servers_changed(self) -> None:
        self._assign_servers()
        self._changed.set()

    def _assign_servers(self) -> None:
        """Assigns servers to waiting requests that can have one now."""
        for rid, server in self._router.place(now_s=self.fleet.now_s()):
            member = self.fleet.members[server]
            url, version = member.registered.address.url, self.fleet.version(member)
            self._send_reply(rid, rm.UseServer(server=server, url=url, version=version))

    def _send_reply(self, rid: str, answer: rm.UseServer) -> None:
        if (waiting := self._answers.pop(rid, None)) is not None and not waiting.done():
            waiting.set_result(answer)

    # ---- the loop -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Checks servers when they are due, until ``leave``. Closes their clients at the end."""
        try:
            async with asyncio.TaskGroup() as tasks:
                checks: set[asyncio.Task[Any]] = set()
                while not self._leaving:
                    tick()
                    self._start_checks(tasks, checks)
                    self._start_dismissals(tasks)
                    await self.fleet.close_left()
                    await self._wait_for_changes()
                for task in checks:
                    task.cancel()
        finally:
            await self.fleet.close_left(everyone=True)

    def _start_checks(self, tasks: asyncio.TaskGroup, checks: set[asyncio.Task[Any]]) -> None:
        now_s, quarantine = self.fleet.now_s(), self.fleet.quarantine
        for server in quarantine.due(now_s=now_s):
            member = self.fleet.members[server]
            if member.checking or member.lock.locked():
                quarantine.schedule_check(server, now_s + IDLE_S)
                continue
            quarantine.schedule_check(server, math.inf)  # the check schedules the next one
            member.checking = True
            task = tasks.create_task(self._check(member), name=f"check of {member.name}")
            checks.add(task)
            task.add_done_callback(checks.discard)

    def _start_dismissals(self, tasks: asyncio.TaskGroup) -> None:
        """Dismisses leaving servers that are idle and not needed, or out of time."""
        now_s, running = self.fleet.now_s(), self._router.running
        overdue = self._leaving_servers.overdue(now_s=now_s)
        late = {index_of(worker) for worker in overdue if worker.startswith(SERVER)}
        for index in self._router.leaving & self.fleet.members.keys():
            is_used = running[index] or self._router.is_needed(index, self._rollout_workers)
            if (is_used and index not in late) or now_s < self._dismiss_at_s.get(index, 0.0):
                continue
            self._dismiss_at_s[index] = now_s + DISMISS_EVERY_S
            logger.info("server dismissed server=%d requests=%d", index, running[index])
            tasks.create_task(self._dismiss(index), name=f"goodbye of generation_server/{index}")

    async def _check(self, member: Member) -> None:
        try:
            await check(member, self.fleet, self.updates)
        finally:
            member.checking = False
            self._servers_changed()

    async def _wait_for_changes(self) -> None:
        next_s = self.fleet.quarantine.next_due_s()
        pause_s = IDLE_S if next_s is None else min(IDLE_S, max(0.0, next_s - self.fleet.now_s()))
        try:
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()


# ---- Checks one server: does it respond, does it generate, does it have the newest weights?
#
# For manager.py, which calls it whenever a server is due by quarantine.py.


INFO_S = 5.0
HEALTH_S = 15.0  # includes a token, queued after those being decoded
GRACE_S = 5.0  # margin over the client's own deadlines
NEVER_CAME_S = 120.0  # from the assignment of a server to reaching it


async def check(member: Member, fleet: Fleet, updates: Updates) -> None:
    """Checks a server; afterwards it is well, with the newest weights, or sick with a reason."""
    began_s, num_updates = fleet.now_s(), member.num_updates
    try:
        why = await _find_fault(member, fleet, began_s=began_s)
    except Exception as error:  # after any error of the client, the server is checked again
        why = error_line(error)
    if not fleet.is_current(member):
        return
    if why and (member.num_updates > num_updates or member.lock.locked()):
        # It is paused during weight updates, which have a deadline of their own.
        fleet.quarantine.schedule_check(
            member.index, fleet.now_s() + fleet.quarantine.rules.check_every_s
        )
    elif why:
        fleet.sick(member, why)
    elif updates.has_turn(member) or await updates.bring_up(member):
        fleet.well(member)


async def _find_fault(member: Member, fleet: Fleet, *, began_s: float) -> str:
    """Returns what is wrong with the server; empty if nothing."""
    num_updates = member.num_updates
    async with asyncio.timeout(INFO_S + GRACE_S):
        info = await member.client.info(timeout_s=INFO_S)
    if not fleet.is_current(member):
        return ""
    if member.num_updates == num_updates and not member.lock.locked():
        fleet.seen(member, info)  # otherwise its information may be older than the known state
    if info.num_running + info.num_waiting == 0:
        gone = fleet.router.forget_idle(member.index, before_s=began_s - NEVER_CAME_S)
        if gone:
            logger.warning(
                "requests never reached server server=%d requests=%d", member.index, gone
            )
            fleet.on_change()
    async with asyncio.timeout(HEALTH_S + GRACE_S):
        is_healthy = await member.client.healthy(timeout_s=HEALTH_S)
    return "" if is_healthy else f"made no token in {HEALTH_S:g} s"
