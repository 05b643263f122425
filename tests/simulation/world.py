"""Virtual time, processes that can be stopped and killed, and a network to one store.

A process's threads are generators. What they yield they wait for: a number sleeps so many seconds of
the node's clock, an ``Rpc`` is a call to the store, a ``Receive`` a message. Between two yields nothing
happens to a process; at each yield anything may. All chance comes from one seed, so a schedule is its
seed. Nothing here knows attempts or workers.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from realsys.api.errors import RealsysError, StoreUnavailable
from realsys.name_resolve.keyspace import EndLease
from realsys.name_resolve.memory_store import MemoryStore, SharedMemory

Thread = Generator[Any, Any, None]
NEVER = float("-inf")


@dataclass(eq=False, slots=True)
class Node:
    """A machine. ``*_until`` are moments of true time up to which something is wrong."""

    name: str
    rate: float  # its clocks run so much faster than true time
    offset_s: float
    down: bool = False
    requests_cut_until: float = NEVER  # what it sends to the store is lost
    replies_cut_until: float = NEVER  # what the store answers is lost
    isolated_until: float = NEVER  # nobody reaches it: no signal, no message, no exit code


@dataclass(eq=False, slots=True)
class Process:
    name: str
    attempt: int
    token: str
    node: Node
    alive: bool = True
    paused_until: float = NEVER
    code: int | None = None
    on_end: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Rpc:
    """``call`` is run with the store when the request arrives. Raises StoreUnavailable or its error."""

    call: Callable[[MemoryStore], Any]
    timeout_s: float


@dataclass(eq=False, slots=True)
class Mailbox:
    owner: Process
    letters: deque[Any] = field(default_factory=deque)
    waiting: Actor | None = None


@dataclass(eq=False, slots=True)
class Receive:
    """The next letter, or None when none came in time."""

    mailbox: Mailbox
    timeout_s: float


@dataclass(eq=False, slots=True)
class Actor:
    process: Process
    thread: Thread
    wait: int = 0  # number of what it waits for: a later answer to an earlier wait is dropped


class Exit(Exception):
    """Raised by a thread: its whole process ends with ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code


class World:
    """``now`` is true time. ``noise`` = chance of loss, of a duplicate, longest extra delay."""

    def __init__(self, seed: int, *, trace: Callable[[float, str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.store_down_until = NEVER
        self.store_refuses = True  # while down: refuses at once, else swallows
        self.noise: tuple[float, float, float] | None = None
        self.num_events = 0
        self.processes: list[Process] = []
        self.shared = SharedMemory()
        self.store = MemoryStore(self.shared, clock=lambda: self.now)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.tracing = trace

    # ---- time -------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, action, arguments))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until and not is_over():
            self.now, _, action, arguments = heapq.heappop(queue)
            self.num_events += 1
            action(*arguments)

    def say(self, text: str) -> None:
        if self.tracing is not None:
            self.tracing(self.now, text)

    def clock(self, process: Process) -> float:
        """The process's monotonic clock."""
        return process.node.offset_s + self.now * process.node.rate

    # ---- processes --------------------------------------------------------------------------

    def start(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def spawn(self, process: Process, thread: Thread) -> None:
        self.after(0.0, self._resume, Actor(process, thread), 0, None, None)

    def end(self, process: Process, code: int) -> None:
        if process.alive:
            process.alive, process.code = False, code
            self.say(f"{process.name}.{process.attempt} ended with {code}")
            for action in process.on_end:
                action()

    def pause(self, process: Process, seconds: float) -> None:
        process.paused_until = max(process.paused_until, self.now + seconds)

    def _resume(self, actor: Actor, wait: int, value: Any, error: Exception | None) -> None:
        process = actor.process
        if wait != actor.wait or not process.alive:
            return
        if process.paused_until > self.now:
            self.after(process.paused_until - self.now, self._resume, actor, wait, value, error)
            return
        actor.wait += 1
        try:
            wanted = actor.thread.send(value) if error is None else actor.thread.throw(error)
        except StopIteration:
            return
        except Exit as exit_:
            self.end(process, exit_.code)
            return
        if type(wanted) is Rpc:
            self._send(actor, wanted)
        elif type(wanted) is Receive:
            self._receive(actor, wanted)
        else:
            self.after(wanted / process.node.rate, self._resume, actor, actor.wait, None, None)

    # ---- messages between processes ---------------------------------------------------------

    def post(self, sender: Process, to: Mailbox, letter: Any) -> None:
        """Kept and sent again until the way is free, as TCP does. The dead read nothing."""
        free = max(sender.node.isolated_until, to.owner.node.isolated_until)
        if sender.node is to.owner.node:
            free = NEVER
        delay_s = self.random.uniform(0.001, 0.01)
        if free > self.now:
            self.after(free - self.now + delay_s, self.post, sender, to, letter)
        else:
            self.after(delay_s, self._deliver, to, letter)

    def _deliver(self, to: Mailbox, letter: Any) -> None:
        to.letters.append(letter)
        if (actor := to.waiting) is not None:
            to.waiting = None
            self._resume(actor, actor.wait, to.letters.popleft(), None)

    def _receive(self, actor: Actor, wanted: Receive) -> None:
        mailbox = wanted.mailbox
        if mailbox.letters:
            self.after(0.0, self._resume, actor, actor.wait, mailbox.letters.popleft(), None)
            return
        mailbox.waiting = actor
        self.after(wanted.timeout_s, self._give_up, mailbox, actor, actor.wait)

    def _give_up(self, mailbox: Mailbox, actor: Actor, wait: int) -> None:
        if mailbox.waiting is actor and actor.wait == wait:
            mailbox.waiting = None
            self._resume(actor, wait, None, None)

    # ---- the store --------------------------------------------------------------------------

    def _send(self, actor: Actor, rpc: Rpc) -> None:
        deadline, delay_s = self.now + rpc.timeout_s, self.random.uniform(0.0005, 0.005)
        if self.noise is not None:
            loss, duplicate, extra_s = self.noise
            if self.random.random() < loss:
                self._lose(actor, actor.wait, deadline)
                return
            if self.random.random() < duplicate:
                late_s = self.random.uniform(0.0, 2 * extra_s)
                self.after(delay_s + late_s, self._execute, actor.process.node, rpc)
            delay_s += self.random.uniform(0.0, extra_s)
        self.after(delay_s, self._arrive, actor, actor.wait, rpc, deadline)

    def _arrive(self, actor: Actor, wait: int, rpc: Rpc, deadline: float) -> None:
        node = actor.process.node
        if self.store_down_until > self.now and self.store_refuses:
            self.after(0.001, self._resume, actor, wait, None, _unavailable("refuses"))
            return
        if self.store_down_until > self.now or node.requests_cut_until > self.now:
            self._lose(actor, wait, deadline)
            return
        value, error = self._execute(node, rpc)
        delay_s = self.random.uniform(0.0005, 0.005)
        if self.noise is not None:
            loss, _, extra_s = self.noise
            delay_s += self.random.uniform(0.0, extra_s)
            if self.random.random() < loss:
                delay_s = float("inf")
        if node.replies_cut_until > self.now or self.now + delay_s > deadline:
            self._lose(actor, wait, deadline)
        else:
            self.after(delay_s, self._resume, actor, wait, value, error)

    def _execute(self, node: Node, rpc: Rpc) -> tuple[Any, Exception | None]:
        if self.store_down_until > self.now or node.requests_cut_until > self.now:
            return None, None  # a duplicate that came too late
        try:
            return rpc.call(self.store), None
        except RealsysError as error:
            return None, error

    def _lose(self, actor: Actor, wait: int, deadline: float) -> None:
        error = _unavailable("did not answer in time")
        self.after(max(0.0, deadline - self.now), self._resume, actor, wait, None, error)

    def stop_store(self, seconds: float, *, refuses: bool) -> None:
        """An outage. When the store is back its leases have their full time again, as etcd's."""
        self.store_refuses = refuses
        self.store_down_until = max(self.store_down_until, self.now + seconds)
        # Leases don't run out while nobody serves; nobody looks either.
        self.after(self.store_down_until - self.now, self._renew_all)

    def _renew_all(self) -> None:
        if self.store_down_until <= self.now:
            for lease_id in self.shared.renewed_s:
                self.shared.renewed_s[lease_id] = self.now

    def lose_leases(self) -> None:
        """The store forgets all leases and their keys at once."""
        self.store.write(lambda space: [EndLease(i, expired=True) for i in list(space.leases)])


def _unavailable(how: str) -> StoreUnavailable:
    return StoreUnavailable(f"the store {how}", where="simulation", fix="wait")
