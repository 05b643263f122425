"""Does the agents' endpoint do what somebody wrote down who had not read it? By hand; two minutes.

    python tests/by_hand/agents/outsider_endpoint.py     writes results/outsider_endpoint.json
    python tests/by_hand/agents/outsider_endpoint.py --file streams --only TEXT     writes nothing

Plays the cases of outsider/streams.jsonl, full_context.jsonl and requests.jsonl (README.md beside
them says how they are written) against the endpoint of an agent in this process, with raw sockets,
and compares replies and trained tokens with what was expected. A line tells of each case that is
otherwise. Expectations that are wrong, or that the project has decided otherwise, stand in
outsider_endpoint_judged.toml with the reason: they are counted apart, and no problem, as long as
nothing else of their case is otherwise.

Other than written: a slow reader is ten times as fast; a policy whose client waits for the stream's head
alone holds for twelve seconds; a policy whose answer a grammar holds ignores max_tokens, since it writes a
letter a token. A delay of others is the time that the event loop works without a pause, in its own thread's
time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from by_hand import HandCheck  # noqa: E402
from case_play import CaseAgent, PlayedCase, case_agent, played, policy_of  # noqa: E402
from case_replies import reply_problems  # noqa: E402
from case_trained import trained_problems  # noqa: E402

OUTSIDER = HERE / "outsider"
FILES = ("streams", "full_context", "requests")
FAMILY = "chatml"
AT_ONCE = 12
MOST_SHOWN = 400  # characters of a line
SCHEMA = "task.agent_args.schema"
_MEASURED = ("others_delayed_ms_at_most", "memory_mb_at_most", "seconds_at_most")

Cases = list[tuple[str, dict[str, Any]]]  # with the file's name


def read_cases(files: list[str], only: str) -> Cases:
    """Reads the cases."""
    rows = [
        (name, json.loads(line))
        for name in files
        for line in (OUTSIDER / f"{name}.jsonl").read_text().splitlines()
    ]
    return [(name, case) for name, case in rows if only in case["id"]]


def is_slow(case: Mapping[str, Any]) -> bool:
    """True for a case that waits most of its time, and measures delays."""
    read = case.get("read")
    return "send" in case or (isinstance(read, dict) and "bytes_per_second" in read)


def is_measured(case: Mapping[str, Any]) -> bool:
    """True for a case that wants the processor for itself."""
    return any(name in case["expect"] for name in _MEASURED) and not is_slow(case)


async def play_all(cases: Cases) -> dict[str, PlayedCase]:
    """Plays cases: many at a time those that wait, and one by one those that measure."""
    made: dict[str, PlayedCase] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            case_agent(FAMILY, Path(folder)) as usual,
            case_agent(FAMILY, Path(folder), schema="enforce") as enforcing,
        ):
            places = asyncio.Semaphore(AT_ONCE)

            asks = {case["id"]: policy_of(case, name, FAMILY) for name, case in cases}

            async def play(case: dict[str, Any]) -> None:
                held = case.get("run", {}).get(SCHEMA) == "enforce"
                agent: CaseAgent = enforcing if held else usual
                async with places:
                    made[case["id"]] = await played(agent, case, asks[case["id"]])

            plain = [c for _, c in cases if not is_slow(c) and not is_measured(c)]
            await asyncio.gather(*map(play, plain))
            await asyncio.gather(*(play(case) for _, case in cases if is_slow(case)))
            for _, case in cases:
                if is_measured(case):
                    await play(case)
    return made


def problems_of(name: str, case: dict[str, Any], made: Mapping[str, PlayedCase]) -> list[str]:
    """Returns what of a case is otherwise than it was expected."""
    own = made[case["id"]]
    if case.get("if_served") and own.exchanges and own.exchanges[0].status in (400, 404):
        return []
    found = list(reply_problems(case, own, made))
    if name == "streams" or "trained" in case["expect"] or "branches" in case["expect"]:
        found += trained_problems(case, own, made)
    return found


def main() -> int:
    """Returns 0 where every case is as it was written, or judged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", choices=FILES, action="append")
    parser.add_argument(
        "--only", default="", help="cases with this in their id; nothing is written"
    )
    given = parser.parse_args()
    check, began = HandCheck(__file__), time.monotonic()
    cases = read_cases(given.file or list(FILES), given.only)
    judged = tomllib.loads((HERE / "outsider_endpoint_judged.toml").read_text())["judged"]
    made = asyncio.run(play_all(cases))
    rates = {name: Counter[str]() for name, _ in cases}
    apis: dict[str, Counter[str]] = {}
    problems, otherwise = [], {}
    for name, case in cases:
        found = problems_of(name, case, made)
        id_ = case["id"]
        known = judged.get(id_, {}).get("otherwise", ())
        left = [problem for problem in found if not any(text in problem for text in known)]
        outcome = "passed" if not found else "failed" if left else "judged"
        rates[name][outcome] += 1
        apis.setdefault(f"{name} {case['api']}", Counter())[outcome] += 1
        if outcome == "judged":
            otherwise[id_] = judged[id_]["why"]
        elif found:
            problems.append(f"{name} {id_}: {' | '.join(left)}"[:MOST_SHOWN])
    for title, counts in (rates | apis).items():
        shown = ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "judged"))
        sys.stdout.write(f"{title}: {shown}\n")
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")
    if given.only or given.file:
        sys.stdout.write("\n".join([*problems, ""]))
        return bool(problems)
    return check.write(
        "an outsider's cases of the agents' endpoint: streams left, full contexts, requests",
        problems,
        rates={title: dict(counts) for title, counts in rates.items()},
        by_api={title: dict(counts) for title, counts in apis.items()},
        judged=otherwise,
    )


if __name__ == "__main__":
    sys.exit(main())
