"""Simulates rollouts, training and weight updates in virtual time, with the ledger of real runs (pure).

For choosing ``max_staleness``, policy and batch size before a run: predicts the combined throughput of
generation servers and trainers, and the samples' staleness. Requests wait at the manager in order of
arrival for a free row of a server whose weights are new enough. Not simulated: prefill, messages, faults,
filters.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lengths import Lengths
from virtual_server import VirtualServer

from realsys.api.errors import InternalError
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.rollout.staleness.tickets import PromptGrant


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Inputs of a simulation. Times are seconds of virtual time.

    Attributes:
        slots, token_s, row_s: of a server, see ``VirtualServer``.
        train_token_s: time of all trainers together per token of a batch.
        batch_size: prompts per step, with ``group_size`` answers each.
        publish_s: time from a step's end until servers can fetch its weights.
        update_s: time for which a server pauses to update its weights.
        interruptible: running answers continue with the new weights; otherwise a server finishes them
            first and accepts no new ones meanwhile.
        whole_batches: no prompt of a batch starts before the previous batch is finished (one-step-off
            training, with ``max_staleness`` 1).
        steps: number of measured steps, after ``warm_up`` others.
    """

    servers: int = 8
    slots: int = 32
    token_s: float = 0.02
    row_s: float = 0.0
    train_token_s: float = 0.02 / (8 * 32)
    batch_size: int = 128
    group_size: int = 16
    lengths: Lengths = field(default_factory=lambda: Lengths(mean=1024, longest=8192))
    max_staleness: int = 2
    policy: str = "wait"
    max_in_flight: int | None = None
    publish_s: float = 0.0
    update_s: float = 0.0
    interruptible: bool = True
    whole_batches: bool = False
    steps: int = 20
    warm_up: int = 6
    seed: int = 1

    @property
    def bound(self) -> float:
        """Upper bound on tokens per second for any schedule: the slower of servers and trainers."""
        decoded = self.servers * self.slots / (self.token_s + self.row_s * self.slots)
        return min(decoded, 1 / self.train_token_s)


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """Results over the measured steps."""

    tokens_per_s: float  # trained
    of_bound: float
    step_s: float
    training: float  # share of time
    decoding: float  # share of row time
    staleness: float  # mean over all prompts
    stalest: int
    thrown_away: float  # prompts per trained prompt


def simulate(setting: SimulationSettings) -> SimulationOutcome:
    """Simulates a run. Deterministic: random numbers come from ``seed``, lengths belong to prompts.

    Raises:
        ConfigError: the ledger rejects these numbers.
    """
    return _Run(setting).play()


@dataclass(eq=False, slots=True)
class _Rollout:
    """A dispatched prompt, with the versions of its tokens so far."""

    ticket: PromptGrant
    left: int  # answers still to come
    oldest: int
    newest: int = 0


_Queue = deque[tuple[int, _Rollout, int]]  # place in the order, owner, tokens


@dataclass(frozen=True, slots=True)
class _Mark:
    """Running sums at the end of a step."""

    now: float = 0.0
    tokens: int = 0
    row_s: float = 0.0
    dropped: int = 0
    staleness: float = 0.0
    stalest: int = 0  # of this step


class _Run:
    def __init__(self, setting: SimulationSettings) -> None:
        self.setting, self.now = setting, 0.0
        self.last = setting.warm_up + setting.steps
        self.ledger = StalenessLedger(
            batch_size=setting.batch_size,
            max_staleness=setting.max_staleness,
            policy=setting.policy,
            max_in_flight=setting.max_in_flight,
            # Longer than measured, so that the run is in a steady state throughout.
            total_steps=self.last + setting.max_staleness + 1,
        )
        self.servers: list[VirtualServer[_Rollout]] = [
            VirtualServer(setting.slots, setting.token_s, setting.row_s)
            for _ in range(setting.servers)
        ]
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        # Answers that wait for a row, by the version they need.
        self.waiting: dict[int, _Queue] = {}
        self.num_asked = self.num_out = 0
        self.draw, self.lengths = random.Random(setting.seed), list[tuple[int, ...]]()
        self.row_s, self.dropped = 0.0, 0
        self.marks = [_Mark()]

    def play(self) -> SimulationOutcome:
        self._ask()
        while self.ledger.version < self.last:
            if not self.heap:
                why = ", ".join(self.ledger.waits_for())
                raise InternalError(
                    f"the simulation is stuck: {why}",
                    where="simulate_rollouts",
                )
            self.now, _, event = heapq.heappop(self.heap)
            event()
        begin, end = self.marks[self.setting.warm_up], self.marks[self.last]
        seconds, tokens = end.now - begin.now, end.tokens - begin.tokens
        rows = self.setting.servers * self.setting.slots
        return SimulationOutcome(
            tokens_per_s=tokens / seconds,
            of_bound=tokens / seconds / self.setting.bound,
            step_s=seconds / self.setting.steps,
            training=tokens * self.setting.train_token_s / seconds,
            decoding=(end.row_s - begin.row_s) / (seconds * rows),
            staleness=(end.staleness - begin.staleness) / self.setting.steps,
            stalest=max(mark.stalest for mark in self.marks[self.setting.warm_up + 1 :]),
            thrown_away=(end.dropped - begin.dropped)
            / (self.setting.steps * self.setting.batch_size),
        )

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (time, self.num_events, event))
        self.num_events += 1

    # ---- the master and its rollout workers -------------------------------------------------------

    def _ask(self) -> None:
        """Requests all available work, as rollout workers with capacity do."""
        size = self.setting.group_size
        while not self._holds_back() and (ticket := self.ledger.admit("rollout_worker/0")):
            self.num_out += 1
            rollout = _Rollout(ticket, size, self.ledger.version)
            queue = self.waiting.setdefault(ticket.min_version, deque())
            for length in self._lengths(ticket.number):
                queue.append((self.num_asked, rollout, length))
                self.num_asked += 1
        self._fill()

    def _holds_back(self) -> bool:
        begun = self.num_out % self.setting.batch_size > 0
        return self.setting.whole_batches and not begun and self.ledger.counts()["in_flight"] > 0

    def _lengths(self, number: int) -> tuple[int, ...]:
        """Lengths of a prompt's answers, equal under all policies."""
        while len(self.lengths) <= number:
            one = self.setting.lengths.draw
            self.lengths.append(tuple(one(self.draw) for _ in range(self.setting.group_size)))
        return self.lengths[number]

    def _deliver(self, rollout: _Rollout) -> None:
        ticket = rollout.ticket
        verdict = self.ledger.deliver(
            ticket.number, ticket.tries, oldest=rollout.oldest, newest=rollout.newest
        )
        self.dropped += not verdict.kept
        self._train()
        self._ask()

    # ---- the trainers -----------------------------------------------------------------------------

    def _train(self) -> None:
        if batch := self.ledger.next_batch():
            self.dropped += len(self.ledger.batch_taken(batch))
            tokens = sum(sum(self._lengths(number)) for number in batch)
            end = self.now + tokens * self.setting.train_token_s
            self._at(end, partial(self._trained, batch, tokens))

    def _trained(self, batch: tuple[int, ...], tokens: int) -> None:
        behind = [self.ledger.version - self.ledger._taken[number].oldest for number in batch]
        self.ledger.trained(batch)
        for server in self.servers:
            self._advance(server)
        former = self.marks[-1]
        self.marks.append(
            _Mark(
                now=self.now,
                tokens=former.tokens + tokens,
                row_s=self.row_s,
                dropped=self.dropped,
                staleness=former.staleness + sum(behind) / len(behind),
                stalest=max(behind),
            )
        )
        self._at(self.now + self.setting.publish_s, partial(self._published, self.ledger.version))
        self._train()
        self._ask()

    # ---- the servers ------------------------------------------------------------------------------

    def _published(self, version: int) -> None:
        for server in self.servers:
            server.wanted = version
            self._update(server)
        self._fill()

    def _update(self, server: VirtualServer[_Rollout]) -> None:
        """Starts the update to the newest weights if the server can."""
        if server.paused or server.version == server.wanted:
            return
        server.drains = not self.setting.interruptible and len(server) > 0
        if not server.drains:
            self._advance(server)
            server.paused = True
            server.changes += 1
            end = self.now + self.setting.update_s
            self._at(end, partial(self._updated, server, server.wanted))

    def _updated(self, server: VirtualServer[_Rollout], version: int) -> None:
        self._advance(server)
        server.paused, server.version = False, version
        self._update(server)  # newer weights were published meanwhile
        self._foresee(server)
        self._fill()

    def _fill(self) -> None:
        """Assigns answers to the servers with the fewest rows, first come, first served."""
        while free := sorted((s for s in self.servers if s.has_room), key=len):
            found = ((s, q) for s in free if (q := self._first_for(s)) is not None)
            if (pair := next(found, None)) is None:
                return
            server, queue = pair
            _, rollout, length = queue.popleft()
            self._advance(server)
            server.join(rollout, length)
            rollout.oldest = min(rollout.oldest, server.version)
            self._foresee(server)

    def _first_for(self, server: VirtualServer[_Rollout]) -> _Queue | None:
        """Returns the queue with the oldest head among those for which the server is new enough."""
        queues = (q for version, q in self.waiting.items() if q and version <= server.version)
        return min(queues, key=lambda queue: queue[0][0], default=None)

    def _rows_end(self, server: VirtualServer[_Rollout], change: int) -> None:
        if change != server.changes:
            return
        self._advance(server)
        done = server.leave()
        self._foresee(server)
        for rollout in done:
            rollout.left -= 1
            rollout.newest = max(rollout.newest, server.version)
            if rollout.left == 0:
                self._deliver(rollout)
        if server.drains:
            self._update(server)
        self._fill()

    def _foresee(self, server: VirtualServer[_Rollout]) -> None:
        server.changes += 1
        if (end := server.next_end()) is not None:
            self._at(end, partial(self._rows_end, server, server.changes))

    def _advance(self, server: VirtualServer[_Rollout]) -> None:
        self.row_s += server.advance(self.now)
