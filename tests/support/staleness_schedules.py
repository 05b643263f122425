"""A ledger played against everything that may happen to a run, and what must hold after each event.

What was given out, delivered and trained is written down here a second time, from the ledger's answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.rollout.staleness.tickets import PromptGrant

Make = Callable[..., StalenessLedger]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is bounded how, and which prompts are filtered (one in ``filter_one_in``; 0: none)."""

    policy: str
    batch_size: int
    max_staleness: int
    total_steps: int
    max_in_flight: int | None = None
    filter_one_in: int = 0

    def filters(self, number: int) -> bool:
        return self.filter_one_in > 0 and number * 7919 % 1009 % self.filter_one_in == 0

    def make(self, make: Make = StalenessLedger) -> StalenessLedger:
        return make(
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            policy=self.policy,
            max_in_flight=self.max_in_flight,
            total_steps=self.total_steps,
        )


@dataclass
class Told:
    """What the ledger has said and heard."""

    out: dict[int, tuple[str, PromptGrant]] = field(default_factory=dict)  # number → holder, ticket
    oldest: dict[int, int] = field(default_factory=dict)  # of the ready and taken
    trained: dict[int, int] = field(default_factory=dict)  # number → step
    batches: list[tuple[int, ...]] = field(default_factory=list)
    filtered: set[int] = field(default_factory=set)
    taken: tuple[int, ...] = ()
    version: int = 0
    next: int = 0  # the first number that was never given out

    def waiting(self) -> set[int]:
        """Numbers to be given out again."""
        known = self.trained.keys() | self.filtered | self.out.keys() | self.oldest.keys()
        return set(range(self.next)) - known


class Schedule:
    """One run; every method is an event that may or may not be possible now."""

    def __init__(self, run: Run, seed: int, make: Make = StalenessLedger) -> None:
        self.run, self.make, self.draw = run, make, random.Random(seed)
        self.ledger, self.told = run.make(make), Told()
        self.saved = self._save()
        self.former: list[tuple[int, int]] = []  # tickets that count no more
        events = [self.ask, self.deliver, self.take, self.train, self.give_up, self.lose]
        events += [self.deliver_again, self.checkpoint, self.resume, self.crash]
        often = [4, 4, 4, 4, 1, 0.3, 0.5, 0.1, 0.05, 0.02]
        # Now a slow trainer, now slow rollouts, now nobody who asks.
        weights = [w * self.draw.choice((0.2, 1, 5)) for w in often]
        self.events, self.weights = events, weights
        self.in_order = self.draw.choice(("first", "last", "any"))

    def play(self, num_events: int) -> None:
        """So many events, then only those that lead on: the run must come to its end."""
        for event in self.draw.choices(self.events, self.weights, k=num_events):
            event()
            self.look()
        self.finish()

    def finish(self) -> None:
        """No more faults. Raises if the run stands still."""
        told, run = self.told, self.run
        left = (run.total_steps - told.version) * run.batch_size
        for _ in range(40 * left + 200):
            if self.ledger.over:
                break
            before = self._state()
            for event in (self.ask, self.take, self.train):
                event()
                self.look()
            if self._state() == before:
                self.deliver()
                self.look()
            assert self._state() != before, f"stands still: {self.ledger.waits_for()}"
        assert self.ledger.over, "never ends"
        assert len(told.trained) == run.total_steps * run.batch_size
        assert not told.waiting(), "a prompt was left out"

    # ---- events -------------------------------------------------------------------------------

    def ask(self) -> None:
        holder = f"rollout_worker/{self.draw.randrange(3)}"
        told, why = self.told, self.ledger.why_not()
        ticket = self.ledger.admit(holder)
        assert (ticket is None) == bool(why)
        if ticket is None:
            return
        number = ticket.number
        assert number == min(told.waiting(), default=told.next), "given out in another order"
        assert 0 <= ticket.min_version <= told.version, "no server can have these weights"
        self._check_target(ticket)
        told.next = max(told.next, number + 1)
        told.out[number] = (holder, ticket)
        assert self.run.max_in_flight is None or len(told.out) <= self.run.max_in_flight

    def _check_target(self, ticket: PromptGrant) -> None:
        told, size = self.told, self.run.batch_size
        gone = told.trained.keys() | told.filtered | set(told.taken)
        before = sum(n not in gone for n in range(ticket.number))
        assert ticket.target_step == self._next_step() + before // size
        least = max(0, ticket.target_step - 1 - self.run.max_staleness)
        if self.run.policy == "window" and ticket.tries:
            assert ticket.min_version >= least
        else:
            assert ticket.min_version == least

    def deliver(self) -> None:
        told, draw = self.told, self.draw
        if not told.out:
            return
        numbers = sorted(told.out)
        at = {"first": 0, "last": -1, "any": draw.randrange(len(numbers))}[self.in_order]
        number = numbers[at]
        ticket = told.out[number][1]
        if self.run.filters(number):
            self._gave_up(number, filtered=True)
            return
        newest_there = self._next_step() - 1
        oldest = draw.choice((ticket.min_version, draw.randint(ticket.min_version, newest_there)))
        newest = draw.randint(oldest, newest_there)
        verdict = self.ledger.deliver(number, ticket.tries, oldest=oldest, newest=newest)
        del told.out[number]
        self.former.append((number, ticket.tries))
        if verdict.kept:
            told.oldest[number] = oldest
            return
        assert self.run.policy == "drop", verdict.why
        assert oldest + self.run.max_staleness + 1 < self._next_step(), "it was not too old"

    def give_up(self) -> None:
        if self.told.out:
            self._gave_up(self.draw.choice(sorted(self.told.out)), filtered=False)

    def _gave_up(self, number: int, *, filtered: bool) -> None:
        _, ticket = self.told.out.pop(number)
        assert self.ledger.give_up(number, ticket.tries, filtered=filtered).kept
        self.former.append((number, ticket.tries))
        if filtered:
            self.told.filtered.add(number)

    def lose(self) -> None:
        holder = f"rollout_worker/{self.draw.randrange(3)}"
        theirs = {n: ticket for n, (who, ticket) in self.told.out.items() if who == holder}
        assert self.ledger.lost(holder) == tuple(sorted(theirs))
        for number, ticket in theirs.items():
            del self.told.out[number]
            self.former.append((number, ticket.tries))

    def deliver_again(self) -> None:
        if self.former:
            number, tries = self.draw.choice(self.former)
            before = self._state()
            now = self.told.version
            assert not self.ledger.deliver(number, tries, oldest=now, newest=now).kept
            assert not self.ledger.give_up(number, tries, filtered=True).kept
            assert self._state() == before

    def take(self) -> None:
        told, batch = self.told, self.ledger.next_batch()
        if batch is None:
            if self.run.policy == "drop" and not told.taken and not self.ledger.over:
                assert len(told.oldest) < self.run.batch_size, "policy drop waits"
            return
        assert list(batch) == sorted(set(batch))
        assert len(batch) == self.run.batch_size
        dropped = self.ledger.batch_taken(batch)
        told.taken = batch
        for number in dropped:
            due = told.oldest.pop(number) + self.run.max_staleness + 1
            assert due < self._next_step(), "it was not too old"
        assert not dropped or self.run.policy == "drop"

    def train(self) -> None:
        told = self.told
        if not told.taken:
            return
        self.ledger.trained(told.taken)
        behind = [told.version - told.oldest.pop(n) for n in told.taken]
        assert max(behind) <= self.run.max_staleness, f"{max(behind)} steps behind"
        told.version += 1
        assert not told.trained.keys() & set(told.taken), "trained twice"
        told.trained |= dict.fromkeys(told.taken, told.version)
        told.batches.append(told.taken)
        told.taken = ()

    def checkpoint(self) -> None:
        if not self.told.taken:
            self.saved = self._save()

    def resume(self) -> None:
        """A restart from what is now, be it in the middle of a step."""
        self._restore(self._save())

    def crash(self) -> None:
        """A restart from the last checkpoint."""
        self._restore(self.saved)

    # ---- what must hold -----------------------------------------------------------------------

    def look(self) -> None:
        ledger, told = self.ledger, self.told
        assert ledger.version == told.version
        counts = ledger.counts()
        assert counts["in_flight"] == len(told.out)
        assert counts["ready"] == len(told.oldest) - len(told.taken)
        assert counts["filtered"] == len(told.filtered)
        if ledger.over:
            assert ledger.next_batch() is None
            assert ledger.why_not()
            return
        moves = told.out or told.taken or ledger.next_batch() or not ledger.why_not()
        assert moves, f"stands still: {ledger.waits_for()}"
        assert bool(ledger.waits_for()) == (ledger.next_batch() is None)

    def _next_step(self) -> int:
        return self.told.version + (2 if self.told.taken else 1)

    def _state(self) -> dict[str, int]:
        return {**self.ledger.counts(), "version": self.ledger.version}

    def _save(self) -> tuple[str, Told]:
        told = deepcopy(self.told)
        told.out, told.taken = {}, ()
        return json.dumps(self.ledger.snapshot()), told

    def _restore(self, saved: tuple[str, Told]) -> None:
        text, told = saved
        self.ledger, self.told, self.former = self.run.make(self.make), deepcopy(told), []
        state: dict[str, Any] = json.loads(text)
        self.ledger.restore(state)
