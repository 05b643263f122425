"""No schedule of deliveries, losses, restarts and lags breaks the ledger's promises; broken rules do."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staleness_schedules import Run, Schedule

from realsys.api.errors import InternalError
from realsys.rollout.staleness import ledger

POLICIES = ("wait", "window", "drop")
runs = st.builds(
    Run,
    policy=st.sampled_from(POLICIES),
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    total_steps=st.integers(0, 8),
    max_in_flight=st.one_of(st.none(), st.integers(1, 12)),
    filter_one_in=st.sampled_from((0, 0, 2, 5)),
)


@settings(max_examples=80, deadline=None)
@given(run=runs, seed=st.integers(0, 2**32), num_events=st.integers(0, 250))
def test_short_runs(run: Run, seed: int, num_events: int) -> None:
    Schedule(run, seed).play(num_events)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_long_run(policy: str, max_staleness: int) -> None:
    run = Run(
        policy=policy,
        batch_size=4,
        max_staleness=max_staleness,
        total_steps=150,
        filter_one_in=6,
    )
    Schedule(run, seed=max_staleness).play(3000)


@settings(max_examples=25, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
    max_staleness=st.integers(0, 3),
    max_in_flight=st.one_of(st.none(), st.integers(1, 20)),
)
def test_batches_of_policy_wait_do_not_depend_on_timing(
    seeds: tuple[int, int], max_staleness: int, max_in_flight: int | None
) -> None:
    run = Run(
        policy="wait",
        batch_size=3,
        max_staleness=max_staleness,
        total_steps=8,
        max_in_flight=max_in_flight,
        filter_one_in=3,
    )
    played = [Schedule(run, seed) for seed in seeds]
    for schedule in played:
        schedule.play(150)
    unfiltered = [n for n in range(200) if not run.filters(n)]
    expected = [tuple(unfiltered[3 * step : 3 * step + 3]) for step in range(8)]
    assert [schedule.told.batches for schedule in played] == [expected, expected]


# A rule of the source, and what it is replaced by. Every one of them must be noticed.
BROKEN = {
    "one more step of staleness at admission": (
        "min_version = max(0, target - 1 - self.max_staleness)",
        "min_version = max(0, target - 2 - self.max_staleness)",
    ),
    "weights in training count as there": (
        "if min_version > self._version:",
        "if min_version > self.next_step - 1:",
    ),
    "the batch in training is forgotten in the place": (
        "target = self.next_step + bisect_left",
        "target = self._version + 1 + bisect_left",
    ),
    "the place counts prompts that were filtered": (
        "            self._close(number)\n            self._filtered += 1",
        "            self._filtered += 1",
    ),
    "returned ones go last": (
        "number = min(self._returned, default=self._next)",
        "number = self._next if self._next < self.batch_size * self.total_steps "
        "else min(self._returned, default=self._next)",
    ),
    "the last returned goes first": (
        "number = min(self._returned, default=self._next)",
        "number = max(self._returned, default=self._next)",
    ),
    "a returned prompt of a window takes room that is promised": (
        "if self.policy is StalenessPolicy.WINDOW and number in self._returned:",
        "if False:",
    ),
    "a window takes whatever is first": (
        "                chosen = deadline_steps.choose(",
        "                chosen = (lambda ready, *_, **__: tuple(ready)[: self.batch_size])(",
    ),
    "a window forgets what is in flight": (
        "        return {n: self._due(flight.min_version) for n, flight in self._in_flight.items()}",
        "        return {}",
    ),
    "a window trusts that servers are new": (
        "        return {n: self._due(flight.min_version) for n, flight in self._in_flight.items()}",
        "        return {n: self._due(self._version) for n in self._in_flight}",
    ),
    "due a step later than may be": (
        "return oldest + self.max_staleness + 1",
        "return oldest + self.max_staleness + 2",
    ),
    "due a step earlier than may be": (
        "return oldest + self.max_staleness + 1",
        "return oldest + self.max_staleness",
    ),
    "policy drop keeps what is too old at delivery": (
        "        if due < self.next_step:\n",
        "        if False:\n",
    ),
    "policy drop keeps what gets too old": (
        "for n, sample in self._ready.items() if self._due(sample.oldest) < self.next_step]",
        "for n, sample in self._ready.items() if False]",
    ),
    "policy drop drops by the version alone": (
        "if self._due(sample.oldest) < self.next_step]",
        "if sample.oldest < self._version]",
    ),
    "policy drop throws away for good": (
        "self._returned[number] = tries + 1\n        self._num_dropped",
        "self._close(number)\n        self._num_dropped",
    ),
    "policy wait takes what is there": (
        "return tuple(batch) if all(n in self._ready for n in batch) else None",
        "return tuple(sorted(self._ready)[: self.batch_size])",
    ),
    "a lost prompt keeps its tries": (
        "self._returned[number] = tries + 1\n        self._num_returned",
        "self._returned[number] = tries\n        self._num_returned",
    ),
    "a lost prompt is not given out again": (
        "            self._return(number, self._in_flight.pop(number).tries)",
        "            self._in_flight.pop(number)",
    ),
    "whoever delivers is believed": (
        "            if flight.tries == tries:\n",
        "            if True:\n",
    ),
    "max_in_flight allows one more": (
        "len(self._in_flight) >= self.max_in_flight",
        "len(self._in_flight) > self.max_in_flight",
    ),
    "no end": ("if target > self.total_steps:", "if False:"),
    "a restart forgets what is in flight": (
        "again = self._returned | {n: f.tries + 1 for n, f in self._in_flight.items()}",
        "again = dict(self._returned)",
    ),
    "a restart forgets the batch in training": (
        "ready = self._taken | self._ready",
        "ready = dict(self._ready)",
    ),
    "a restart forgets how old its samples are": (
        "[[n, r.tries, r.oldest, r.newest] for n, r in ready.items()]",
        "[[n, r.tries, r.newest, r.newest] for n, r in ready.items()]",
    ),
    "a restart hands out trained ones": (
        '"next": self._next,',
        '"next": self._version * self.batch_size,',
    ),
}


def mutated(old: str, new: str) -> ModuleType:
    """The ledger's module with one rule broken; the tree keeps its own."""
    source = Path(ledger.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{source.count(old)} times in the source: {old}"
    module = ModuleType("broken_staleness")
    sys.modules[module.__name__] = module  # dataclasses look there
    try:
        exec(compile(source.replace(old, new), "broken_staleness", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(rule: str) -> None:
    broken = mutated(*BROKEN[rule])
    for seed in (236, *range(400)):  # the rarest is seen at 236
        draw = random.Random(seed)
        run = Run(
            policy=next((p for p in POLICIES if p in rule), draw.choice(POLICIES)),
            batch_size=draw.choice((1, 2, 4)),
            max_staleness=draw.choice((0, 1, 2, 3)),
            total_steps=10,
            max_in_flight=draw.choice((None, 5)),
            filter_one_in=draw.choice((0, 0, 4)),
        )
        try:
            Schedule(run, seed, broken.StalenessLedger).play(250)
        except (AssertionError, InternalError, KeyError):
            return
    pytest.fail("nobody noticed")
