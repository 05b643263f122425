"""Are tokens of agents' conversations trained on as they were sampled? By hand; ten minutes on two cores.

    python tests/by_hand/agents/fuzz_histories.py --histories 100000  writes results/fuzz_histories.json

A simulated policy samples any tokens, also such that a tokenizer would not make of their text; clients
continue, edit, cut and fork their histories, change tools, system texts and arguments of the template,
disconnect, leave streams in the middle, have answers go on, retry, write arguments of calls anew, drop
thoughts. Every token that is trained on is looked up in the policy's log: its
id, log-prob, version, and all tokens before it. Beside it is counted what a run would train on if it
tokenised the final conversation anew: how many conversations are then others than the policy's, and how
many of its tokens are others, or behind others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from by_hand import HandCheck
from chat_families import FAMILIES
from fuzzed_history import FuzzedHistory

PART = 500  # histories between two lines of progress
MOST_PROBLEMS = 20
Counts = dict[str, Counter[str]]


def play(place: tuple[str, int, int]) -> tuple[Counts, list[str]]:
    """Plays some histories of a family; returns counts by how the tokens were spoiled, and problems."""
    family, first, num = place
    counts: Counts = {}
    problems: list[str] = []

    async def every() -> None:
        for seed in range(first, first + num):
            history = FuzzedHistory(FAMILIES[family], seed)
            await asyncio.wait_for(history.run(), 60)
            history.counts["histories"] += 1
            counts.setdefault(history.noise, Counter()).update(history.counts)
            problems.extend(f"{family} {seed}: {p}"[:500] for p in history.problems)

    asyncio.run(every())
    return counts, problems


def every_part(places: list[tuple[str, int, int]], processes: int) -> Iterator[Any]:
    """Yields what ``play`` returns of each."""
    if processes == 1:
        yield from map(play, places)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(play, places)


def shares(counts: Counter[str]) -> dict[str, Any]:
    """What the result tells of one family, or of one kind of tokens."""
    names = (
        *("histories", "requests", "refused", "failed", "trained", "retokenised"),
        *("left midway", "gone on with a part", "last message", "template arguments"),
    )
    return {
        **{name: counts[name] for name in names},
        "naive": {
            "conversations": counts["naive conversations"],
            "conversations_wrong": _share(counts, "naive conversations"),
            "tokens_wrong": _share(counts, "naive tokens"),
        },
    }


def _share(counts: Counter[str], name: str) -> float:
    return round(counts[f"{name} wrong"] / max(1, counts[name]), 4)


def main() -> int:
    """Returns 0 if every trained token is one that was sampled there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=100_000, help="of all families together")
    parser.add_argument("--seed", type=int, default=0, help="of the first history of each family")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    check, began = HandCheck(__file__), time.monotonic()
    of_each = -(-options.histories // len(FAMILIES))
    places = [
        (family, options.seed + first, min(PART, of_each - first))
        for first in range(0, of_each, PART)
        for family in FAMILIES
    ]
    counts: dict[str, Counts] = {}
    problems: list[str] = []
    done = 0
    for place, (found, wrong) in zip(places, every_part(places, options.processes), strict=True):
        for noise, counted in found.items():
            counts.setdefault(place[0], {}).setdefault(noise, Counter()).update(counted)
        problems += wrong
        done += place[2]
        seconds = time.monotonic() - began
        sys.stdout.write(f"{done} histories, {len(problems)} problems, {seconds:.0f} s\n")
        sys.stdout.flush()
    families = {name: sum(kinds.values(), Counter()) for name, kinds in counts.items()}
    everything = sum(families.values(), Counter[str]())
    if everything["retokenised"] and not problems:
        problems.append(f"{everything['retokenised']} trained tokens are not as they were sampled")
    noises = {
        name: {noise: shares(counted)["naive"] for noise, counted in sorted(kinds.items())}
        for name, kinds in counts.items()
    }
    return check.write(
        "trained tokens of fuzzed conversations, against the log of the policy that sampled them",
        problems[:MOST_PROBLEMS],
        args=f"--histories {options.histories} --seed {options.seed}",
        num_problems=len(problems),
        all=shares(everything),
        families={name: shares(counted) for name, counted in families.items()},
        naive_by_tokens=noises,
    )


if __name__ == "__main__":
    sys.exit(main())
