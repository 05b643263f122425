"""Plays schedules.

python -m tests.simulation.run --seed 17        one, with its trace
python -m tests.simulation.run --seeds 0-9999   many; each that fails is printed with its command

"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))  # pytest has it by pyproject.toml

from .faults import plan_faults
from .invariants import violations
from .supervisor import supervise
from .trial import Rules, Trial
from .world import World

HORIZON_S = 1500.0


@dataclass(frozen=True)
class Outcome:
    seed: int
    violations: tuple[str, ...]
    verdict: str
    num_attempts: int
    num_events: int
    ended_at: float


def play(
    seed: int, rules: Rules | None = None, *, trace: Callable[[float, str], None] | None = None
) -> Outcome:
    """One schedule, from its beginning to the end of its last process."""
    world = World(seed, trace=trace)
    chance = world.random
    trial = Trial(
        world=world,
        rules=rules or Rules(),
        num_steps=chance.randint(6, 10),
        num_workers=chance.randint(2, 4),
        num_nodes=chance.randint(2, 3),
        has_own_stores=seed // 10 % 4 == 3,
    )
    plan = plan_faults(trial, seed)
    world.after(0.0, trial.submit, supervise)

    def is_over() -> bool:
        return bool(trial.verdict) and not any(process.alive for process in world.processes)

    world.run(HORIZON_S, is_over)
    found = tuple(violations(trial, plan))
    return Outcome(seed, found, trial.verdict, len(trial.jobs), world.num_events, world.now)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one and print what happens")
    parser.add_argument("--seeds", default="0-999", help="play these, e.g. 0-999")
    options = parser.parse_args()
    rules = Rules()
    logging.disable(logging.CRITICAL)  # thousands of leases expire
    if options.seed is not None:
        outcome = play(options.seed, rules, trace=_print)
        _show(outcome, rules)
        return 1 if outcome.violations else 0
    first, _, last = options.seeds.partition("-")
    began, num_bad, num_events, verdicts = time.monotonic(), 0, 0, dict[str, int]()
    seeds = range(int(first), int(last or first) + 1)
    for seed in seeds:
        outcome = play(seed, rules)
        num_events += outcome.num_events
        verdicts[outcome.verdict] = verdicts.get(outcome.verdict, 0) + 1
        if outcome.violations:
            num_bad += 1
            _show(outcome, rules)
    seconds = time.monotonic() - began
    a_minute = 60 * len(seeds) / seconds
    sys.stdout.write(
        f"{len(seeds)} schedules, {num_bad} bad, {num_events} events in {seconds:.1f} s "
        f"({a_minute:.0f} schedules a minute); ended: {verdicts}\n"
    )
    return 1 if num_bad else 0


def _print(at: float, text: str) -> None:
    sys.stdout.write(f"{at:9.3f}  {text}\n")


def command(seed: int, rules: Rules) -> str:
    """Shows the trace."""
    return f"python -m tests.simulation.run --seed {seed}"


def _show(outcome: Outcome, rules: Rules) -> None:
    for violation in outcome.violations:
        sys.stdout.write(f"seed {outcome.seed}: {violation}\n")
    if outcome.violations:
        sys.stdout.write(f"  see: {command(outcome.seed, rules)}\n")
        sys.stdout.flush()  # the run may be cut short


if __name__ == "__main__":
    sys.exit(main())
