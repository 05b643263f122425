"""Staleness ledger: decides which prompts may start and which are trained together (pure).

Prompts are numbered by the run's endless order (0, 1, 2, …), weights by their version, the number of
training steps that made them. Step s trains version s − 1 into s; a sample's staleness in it is s − 1 minus
the version of its oldest token, and never exceeds ``max_staleness``::

        admit              deliver             batch_taken         trained
    ─────────▶ in flight ───────────▶ ready ─────────────▶ taken ─────────▶ gone
         ▲         │ lost, give_up      │ too old (policy drop)
         └─────────┴── given out again ◀┘            give_up(filtered) ──▶ gone

A prompt's *place* is the number of open prompts (neither trained nor filtered) before it, which determines
its *target step*. It is dispatched once its target is near enough, together with the oldest version that
its tokens may have. So no sample is discarded for its age (policies ``wait`` and ``window``): samples that
would be too stale are never generated.

Used by the master's event loop only. It uses no clock, tensors or sockets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import ConfigError, InternalError, did_you_mean
from realsys.rollout.staleness import deadline_steps
from realsys.rollout.staleness.tickets import (
    PromptGrant,
    StalenessPolicy,
    TicketVerdict,
)


@dataclass(frozen=True, slots=True)
class _InFlight:
    holder: str
    tries: int
    min_version: int


@dataclass(frozen=True, slots=True)
class _Ready:
    tries: int
    oldest: int
    newest: int


class StalenessLedger:
    """State of all prompts of a run that are neither trained nor filtered.

    Args:
        batch_size: prompts per training step.
        max_staleness: 0 is synchronous.
        max_in_flight: maximum number of dispatched prompts; None: as many as staleness allows.
        total_steps: length of the run; prompts that it will not train are not dispatched.
    Raises:
        ConfigError: a number is out of range, or the policy is unknown.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        policy: str,
        max_in_flight: int | None = None,
        total_steps: int,
    ) -> None:
        _check(batch_size, max_staleness, policy, max_in_flight, total_steps)
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.policy, self.max_in_flight = StalenessPolicy(policy), max_in_flight
        self.total_steps = total_steps
        self._version = 0
        self._next = 0  # the first number that was never dispatched
        self._open: list[int] = []  # dispatched at least once, not yet taken or filtered; ascending
        self._returned: dict[int, int] = {}  # to be dispatched again → tries
        self._in_flight: dict[int, _InFlight] = {}
        self._ready: dict[int, _Ready] = {}  # in order of arrival
        self._taken: dict[int, _Ready] = {}
        self._filtered = self._num_dropped = self._num_returned = 0

    # ---- state ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of completed training steps."""
        return self._version

    @property
    def next_step(self) -> int:
        """The first step without a batch."""
        return self._version + (2 if self._taken else 1)

    @property
    def over(self) -> bool:
        """True when all steps are trained."""
        return self._version >= self.total_steps

    def counts(self) -> dict[str, int]:
        """Numbers of prompts now (in_flight, ready, waiting) and since the run began, for metrics.

        ``returned``: prompts lost or given up by a holder; ``dropped``: prompts that became too stale.
        """
        return {
            "in_flight": len(self._in_flight),
            "ready": len(self._ready),
            "waiting": len(self._returned),
            "trained": self._version * self.batch_size,
            "filtered": self._filtered,
            "dropped": self._num_dropped,
            "returned": self._num_returned,
        }

    # ---- dispatch ---------------------------------------------------------------------------------

    def admit(self, holder: str) -> PromptGrant | None:
        """Dispatches the next prompt to ``holder``; returns None if none may start (``why_not``)."""
        offer = self._offer()
        if isinstance(offer, str):
            return None
        if self._returned.pop(offer.number, None) is None:
            self._open.append(offer.number)
            self._next += 1
        self._in_flight[offer.number] = _InFlight(holder, offer.tries, offer.min_version)
        return offer

    def offer(self) -> PromptGrant | None:
        """Returns the prompt that ``admit`` would dispatch now; None if none may start."""
        offer = self._offer()
        return None if isinstance(offer, str) else offer

    def why_not(self) -> str:
        """Returns why no prompt may start; empty if one may."""
        offer = self._offer()
        return offer if isinstance(offer, str) else ""

    def _offer(self) -> PromptGrant | str:
        if self.over:
            return f"all {self.total_steps} steps are trained"
        if self.max_in_flight is not None and len(self._in_flight) >= self.max_in_flight:
            return f"{len(self._in_flight)} prompts are in flight, max_in_flight allows no more"
        # Returned ones first: later prompts were admitted assuming that they come first.
        number = min(self._returned, default=self._next)
        target = self.next_step + bisect_left(self._open, number) // self.batch_size
        if target > self.total_steps:
            return f"all prompts of the {self.total_steps} steps are given out"
        min_version = max(0, target - 1 - self.max_staleness)
        if self.policy is StalenessPolicy.WINDOW and number in self._returned:
            min_version = self._first_version_with_room(min_version)
        # Weights in training are not available yet, so this uses the current version.
        if min_version > self._version:
            return (
                f"prompt {number} is for step {target} and needs weights of version {min_version} "
                f"(max_staleness {self.max_staleness}); the newest are of version {self._version}"
            )
        tries = self._returned.get(number, 0)
        return PromptGrant(number=number, tries=tries, min_version=min_version, target_step=target)

    def _first_version_with_room(self, at_least: int) -> int:
        """Oldest version whose deadline step has room for a returned prompt, at least ``at_least``.

        Its earlier deadline step may be taken by now. A new prompt always has room at its target
        step, since its place counts all open prompts.
        """
        due = deadline_steps.first_room(
            (*self._dues(self._ready).values(), *self._running_dues().values()),
            earliest=self._due(at_least),
            latest=self._due(self._version),
            next_step=self.next_step,
            batch_size=self.batch_size,
        )
        return self._version + 1 if due is None else due - 1 - self.max_staleness

    # ---- delivery --------------------------------------------------------------------------------

    def deliver(self, number: int, tries: int, *, oldest: int, newest: int) -> TicketVerdict:
        """Accepts a prompt's answers, whose tokens come from versions ``oldest`` … ``newest``.

        Rejects unknown, duplicate and superseded ones and, with policy drop, too stale ones (which are
        dispatched again).

        Raises:
            InternalError: the versions are impossible, or ``min_version`` was not respected.
        """
        if refusal := self._refusal(number, tries):
            return TicketVerdict(False, refusal)
        # Weights of a step in training may be published before it is completed
        there = self.next_step - 1
        if not 0 <= oldest <= newest <= there:
            raise InternalError(
                f"prompt {number} has tokens of versions {oldest} to {newest}; "
                f"there are 0 to {there}",
                where="StalenessLedger.deliver",
            )
        flight, due = self._in_flight[number], self._due(oldest)
        if self.policy is not StalenessPolicy.DROP and (
            oldest < flight.min_version or due < self.next_step
        ):
            raise InternalError(
                f"prompt {number} has tokens of version {oldest}, its ticket said "
                f"{flight.min_version} or newer; the next step is {self.next_step}",
                where=f"{flight.holder}, or the generation server it used",
            )
        del self._in_flight[number]
        if due < self.next_step:
            self._drop(number, tries)
            return TicketVerdict(
                False,
                f"too old: tokens of version {oldest} may be trained until step {due}, "
                f"the next is {self.next_step}",
            )
        self._ready[number] = _Ready(tries, oldest, newest)
        return TicketVerdict(True)

    def give_up(self, number: int, tries: int, *, filtered: bool) -> TicketVerdict:
        """Handles a prompt that its holder will not deliver: dispatched again or, if ``filtered``,
        removed.

        Prompts after a filtered one move up by one place.
        """
        if refusal := self._refusal(number, tries):
            return TicketVerdict(False, refusal)
        del self._in_flight[number]
        if filtered:
            self._close(number)
            self._filtered += 1
        else:
            self._return(number, tries)
        return TicketVerdict(True)

    def is_holding(self, holder: str) -> bool:
        """True if prompts are in flight at ``holder``."""
        return any(flight.holder == holder for flight in self._in_flight.values())

    @property
    def num_in_flight(self) -> int:
        """Number of prompts that holders have now."""
        return len(self._in_flight)

    def is_in_flight(self, number: int) -> bool:
        """True if a holder has the prompt now."""
        return number in self._in_flight

    def lost(self, holder: str) -> tuple[int, ...]:
        """Returns all prompts in flight at ``holder`` to be dispatched again; lists their numbers,
        ascending.
        """
        gone = sorted(n for n, flight in self._in_flight.items() if flight.holder == holder)
        for number in gone:
            self._return(number, self._in_flight.pop(number).tries)
        return tuple(gone)

    def _refusal(self, number: int, tries: int) -> str:
        flight = self._in_flight.get(number)
        if flight is not None:
            if flight.tries == tries:
                return ""
            return f"superseded: prompt {number} is at {flight.holder} now (try {flight.tries})"
        if number in self._returned:
            return f"superseded: prompt {number} is to be given out again"
        if number in self._ready or number in self._taken:
            return f"double: prompt {number} was delivered already"
        if 0 <= number < self._next:
            return f"double: prompt {number} is trained or filtered already"
        return f"unknown: prompt {number} was never given out"

    # ---- batches ----------------------------------------------------------------------------------

    def next_batch(self) -> tuple[int, ...] | None:
        """Returns the prompts of the next step, ascending; None while it must wait (``waits_for``).

        It depends only on what was delivered and in which order. Call ``batch_taken`` next.
        """
        if self._taken or self.over or len(self._ready) < self.batch_size:
            return None
        match self.policy:
            case StalenessPolicy.WAIT:
                batch = self._open[: self.batch_size]
                return tuple(batch) if all(n in self._ready for n in batch) else None
            case StalenessPolicy.WINDOW:
                chosen = deadline_steps.choose(
                    self._dues(self._ready),
                    self._running_dues(),
                    step=self.next_step,
                    batch_size=self.batch_size,
                )
                return None if chosen is None else tuple(sorted(chosen))
            case StalenessPolicy.DROP:
                return tuple(sorted(list(self._ready)[: self.batch_size]))

    def waits_for(self) -> tuple[str, ...]:
        """Describes what the next batch waits for; empty if it is available or none will follow."""
        if self.over or self.next_batch() is not None:
            return ()
        if self._taken:
            return (f"step {self._version + 1}, which is in training",)
        if self.policy is StalenessPolicy.WAIT:
            turn = self._open[: self.batch_size]
            who = [self._whereabouts(n) for n in turn if n not in self._ready]
            if len(turn) < self.batch_size:
                who.append(f"prompt {self._next} and later: {self.why_not() or 'nobody asks'}")
            return tuple(who)
        if (missing := self.batch_size - len(self._ready)) > 0:
            out = [self._whereabouts(n) for n in self._open if n not in self._ready]
            return (f"{missing} more of", *(out or [self.why_not() or "nobody asks for prompts"]))
        late = deadline_steps.must_wait_for(
            self._dues(self._ready),
            self._running_dues(),
            step=self.next_step,
            batch_size=self.batch_size,
        )
        return tuple(self._whereabouts(n) for n in late)

    def batch_taken(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Marks the prompts that ``next_batch`` returned as being trained.

        Returns:
            Prompts that are too stale for all later steps and will be dispatched again (policy drop): their
            tensors can be freed.
        Raises:
            InternalError: it is not a valid batch at this point.
        """
        batch = {n: self._ready[n] for n in numbers if n in self._ready}
        turn = (
            self._open[: self.batch_size] if self.policy is StalenessPolicy.WAIT else sorted(batch)
        )
        if self._taken or len(batch) != self.batch_size or sorted(numbers) != turn:
            raise InternalError(
                f"prompts {tuple(numbers)} are not the next batch of {self.batch_size} ready ones"
                + (f"; step {self._version + 1} is in training" if self._taken else ""),
                where="StalenessLedger.batch_taken",
            )
        for number in batch:
            del self._ready[number]
            self._close(number)
        self._taken = batch
        late = [n for n, sample in self._ready.items() if self._due(sample.oldest) < self.next_step]
        if self.policy is not StalenessPolicy.DROP:
            self._check_all_in_time(late)
        for number in late:
            self._drop(number, self._ready.pop(number).tries)
        return tuple(sorted(late))

    def trained(self, numbers: Sequence[int]) -> None:
        """Completes the step: removes ``numbers`` and advances the version.

        Raises:
            InternalError: they are not those taken, or the staleness bound was violated.
        """
        if not self._taken or sorted(numbers) != sorted(self._taken):
            raise InternalError(
                f"trained {tuple(numbers)}, taken were {tuple(sorted(self._taken))}",
                where="StalenessLedger.trained",
            )
        behind = {n: self._version - sample.oldest for n, sample in self._taken.items()}
        if broken := {n: b for n, b in behind.items() if b > self.max_staleness}:
            raise InternalError(
                f"step {self._version + 1} was trained on prompts {broken} steps behind, "
                f"max_staleness is {self.max_staleness}",
                where="StalenessLedger.trained",
            )
        self._taken = {}
        self._version += 1

    # ---- for a checkpoint -------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Returns plain values for ``restore``. Prompts in flight count as lost, taken ones as ready."""
        again = self._returned | {n: f.tries + 1 for n, f in self._in_flight.items()}
        ready = self._taken | self._ready
        return {
            "batch_size": self.batch_size,
            "max_staleness": self.max_staleness,
            "policy": self.policy.value,
            "version": self._version,
            "next": self._next,
            "again": [[n, again[n]] for n in sorted(again)],
            "ready": [[n, r.tries, r.oldest, r.newest] for n, r in ready.items()],
            "filtered": self._filtered,
            "dropped": self._num_dropped,
            "returned": self._num_returned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a ``snapshot``; the current state is discarded.

        Raises:
            ConfigError: it was made with another batch size, bound or policy.
        """
        for name in ("batch_size", "max_staleness", "policy"):
            if state[name] != (ours := getattr(self, name)):
                raise ConfigError(
                    f"the checkpoint was made with {name} {state[name]}, this run has {ours}",
                    where=name,
                    fix="resume with the former, or start a new trial from the checkpoint's model",
                )
        self._version, self._next = state["version"], state["next"]
        self._returned = dict(state["again"])
        self._ready = {number: _Ready(*rest) for number, *rest in state["ready"]}
        self._open = sorted([*self._returned, *self._ready])
        self._in_flight, self._taken = {}, {}
        self._filtered = state["filtered"]
        self._num_dropped, self._num_returned = state["dropped"], state["returned"]

    # ---- helpers ----------------------------------------------------------------------------------

    def _due(self, oldest: int) -> int:
        """Last step that may train on a token of version ``oldest``."""
        return oldest + self.max_staleness + 1

    def _dues(self, samples: Mapping[int, _Ready]) -> dict[int, int]:
        return {n: self._due(sample.oldest) for n, sample in samples.items()}

    def _running_dues(self) -> dict[int, int]:
        """Earliest deadline steps of running prompts, for the oldest weights that their grants allow."""
        return {n: self._due(flight.min_version) for n, flight in self._in_flight.items()}

    def _check_all_in_time(self, late: Sequence[int]) -> None:
        """Raises if taking this batch would make others miss their deadline steps."""
        dues = (*self._dues(self._ready).values(), *self._running_dues().values())
        if late or not deadline_steps.fits(
            dues, next_step=self.next_step, batch_size=self.batch_size
        ):
            raise InternalError(
                f"after the batch of step {self._version + 1}, not all of {self._open} can be trained "
                f"in time (max_staleness {self.max_staleness})",
                where="StalenessLedger.batch_taken",
            )

    def _return(self, number: int, tries: int) -> None:
        self._returned[number] = tries + 1
        self._num_returned += 1

    def _drop(self, number: int, tries: int) -> None:
        self._returned[number] = tries + 1
        self._num_dropped += 1

    def _close(self, number: int) -> None:
        del self._open[bisect_left(self._open, number)]

    def _whereabouts(self, number: int) -> str:
        if flight := self._in_flight.get(number):
            return f"prompt {number} at {flight.holder} (try {flight.tries})"
        return f"prompt {number}, to be given out again (try {self._returned[number]})"


def _check(
    batch_size: int, max_staleness: int, policy: str, max_in_flight: int | None, total_steps: int
) -> None:
    least = {"batch_size": (batch_size, 1), "max_staleness": (max_staleness, 0)}
    least |= {"max_in_flight": (1 if max_in_flight is None else max_in_flight, 1)}
    least |= {"total_steps": (total_steps, 0)}
    for name, (value, bound) in least.items():
        if value < bound:
            raise ConfigError(f"{name} is {value}", where=name, fix=f"use {bound} or more")
    if policy not in tuple(StalenessPolicy):
        raise ConfigError(
            f"no staleness policy {policy!r}",
            where="policy",
            fix=did_you_mean(policy, [p.value for p in StalenessPolicy]),
        )
