"""Simulates the speed of asynchronous training by staleness, policy and updates, in virtual time.

    python benchmarks/bench_async_schedule.py [--steps 20] [--seed 1]

The ledger and the order in which requests get rows are real; generation and training take given seconds.
Prints the markdown tables of docs/benchmarks.md; deterministic. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lengths import Lengths
from simulate_rollouts import (
    SimulationOutcome,
    SimulationSettings,
    simulate,
)

Play = Callable[..., SimulationOutcome]
ANSWERS_A_ROW = 8  # in a batch
ONE_OFF = {"max_staleness": 1, "whole_batches": True, "interruptible": False}


def say(line: str) -> None:
    """A line of the answer, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def colocated(setting: SimulationSettings) -> dict[str, Any]:
    """All devices do both in turn, at no cost for the change: twice the servers, twice the trainers."""
    return {
        "max_staleness": 0,
        "servers": 2 * setting.servers,
        "train_token_s": setting.train_token_s / 2,
    }


def batch_of(setting: SimulationSettings, answers_a_row: float) -> dict[str, Any]:
    """A batch of so many answers for each row of all servers."""
    rows = setting.servers * setting.slots
    return {"batch_size": round(answers_a_row * rows / setting.group_size)}


def schedules(play: Play, setting: SimulationSettings) -> None:
    """Every schedule in one setting."""
    say(
        "| schedule | tokens/s | of the bound | times sync | prompts thrown away | staleness: mean |"
    )
    say("|---|---:|---:|---:|---:|---:|")
    sync = play()

    def row(name: str, of: SimulationOutcome) -> None:
        share, times = of.tokens_per_s / setting.bound, of.tokens_per_s / sync.tokens_per_s
        say(
            f"| {name} | {of.tokens_per_s:,.0f} | {share:.0%} | {times:.2f} "
            f"| {of.thrown_away:.0%} | {of.staleness:.2f} |"
        )

    row("sync: servers and trainers take turns", sync)
    row("sync, all 16 do both", play(**colocated(setting)))
    row("one step off, whole batches", play(**ONE_OFF))
    for interruptible in (True, False):
        for policy in ("wait", "window", "drop"):
            for eta in (1, 2, 4):
                how = {"max_staleness": eta, "policy": policy, "interruptible": interruptible}
                name = f"`schedule.max_staleness={eta}`, {policy}"
                row(name if interruptible else name + ", servers drained", play(**how))


def space(play: Play, setting: SimulationSettings) -> None:
    """Two steps of staleness in other settings."""
    say("| setting | sync | one step off | η = 1 | η = 2 | η = 4 | η = 2 over sync | over all 16 |")
    say("|---|---:|---:|---:|---:|---:|---:|---:|")
    token_s, train_s = setting.token_s, setting.train_token_s
    rows: dict[str, dict[str, Any]] = {"as above": {}}
    for n in (2, 4, 6, 16):
        rows[f"{n} answers a row"] = batch_of(setting, n)
    for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
        rows[f"training takes {factor} times generation"] = {"train_token_s": train_s * factor}
    for share in (0.5, 1.0):
        name = f"{share:.0%} of a decoding step grows with its rows"
        rows[name] = {
            "token_s": token_s * (1 - share),
            "row_s": token_s * share / setting.slots,
        }
    for spread in (0, 0.5, 1.5):
        lengths = replace(setting.lengths, spread=spread)
        rows[f"spread {spread} of lengths"] = {"lengths": lengths}
    rows["answers apart, not in groups of 16"] = {
        "group_size": 1,
        "batch_size": setting.batch_size * setting.group_size,
    }
    for seconds in (5, 15):
        rows[f"weights: {seconds} s to publish, {seconds} s of pause"] = {
            "publish_s": seconds,
            "update_s": seconds,
        }
    for name, changed in rows.items():
        here = replace(setting, **changed)
        sync = play(**changed)
        one_off = play(**{**changed, **ONE_OFF})
        stale = [play(**{**changed, "max_staleness": eta}) for eta in (1, 2, 4)]
        both = play(**{**changed, **colocated(here)})
        shares = " | ".join(f"{of.tokens_per_s / here.bound:.0%}" for of in (sync, one_off, *stale))
        two = stale[1].tokens_per_s
        say(
            f"| {name} | {shares} | {two / sync.tokens_per_s:.2f} | {two / both.tokens_per_s:.2f} |"
        )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    setting = SimulationSettings(
        lengths=Lengths(mean=1024, longest=8192),
        max_staleness=0,
        publish_s=2,
        update_s=1,
        steps=given.steps,
        seed=given.seed,
    )
    setting = replace(setting, **batch_of(setting, ANSWERS_A_ROW))

    def play(**changed: Any) -> SimulationOutcome:
        return simulate(replace(setting, **changed))

    say(f"bound: {setting.bound:,.0f} tokens/s\n")
    schedules(play, setting)
    say("")
    space(play, setting)


if __name__ == "__main__":
    main()
