"""The outsider's tables of calls, servers and scores, and what became of their cases.

For outsider_calls.py, outsider_scores.py, outsider_gyms.py and outsider_mcp.py. A case fails, passes, or is
not played for a reason. One that fails and is in outsider_judged.toml is judged: there it says why the
table is wrong, or why the project decides otherwise.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from by_hand import HandCheck

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
_LONGEST = 300  # characters of a value in a line


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case: ``passed``, ``failed`` or ``not played``. ``group``: counted together."""

    id: str
    certain: bool
    status: str
    expected: str = ""
    got: str = ""
    group: str = ""


@dataclass(kw_only=True)
class Told:
    """What is told of a table: counts, and the ids that are to be looked at."""

    rates: dict[str, dict[str, int]] = field(default_factory=dict)
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    judged: dict[str, str] = field(default_factory=dict)
    judged_but_passed: list[str] = field(default_factory=list)
    not_played: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def cases(table: str) -> list[dict[str, Any]]:
    """Reads a table of the outsider's, e.g. ``mcp``."""
    text = (HERE / "outsider" / f"{table}.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n") if line]  # texts hold other line ends


def passed(case: dict[str, Any], *, group: str = "") -> Outcome:
    """Returns that a case is as the table has it."""
    return Outcome(id=case["id"], certain=_certain(case), status="passed", group=group)


def failed(
    case: dict[str, Any], got: object, *, expected: object = None, group: str = ""
) -> Outcome:
    """Returns that a case is otherwise."""
    wanted = case["expect"] if expected is None else expected
    return Outcome(
        id=case["id"],
        certain=_certain(case),
        status="failed",
        expected=_short(wanted),
        got=_short(got),
        group=group,
    )


def not_played(case: dict[str, Any], why: str, *, group: str = "") -> Outcome:
    """Returns that nobody knows whether a case is as the table has it."""
    return Outcome(id=case["id"], certain=_certain(case), status="not played", got=why, group=group)


def ends_after(seconds: float) -> None:
    """Ends this process after that time, whatever it waits for."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def tell(table: str, outcomes: Sequence[Outcome], *, with_problems: bool) -> Told:
    """Counts, and writes what was found.

    Args:
        with_problems: also a line for each case that fails and is not judged.
    """
    judged = tomllib.loads((HERE / "outsider_judged.toml").read_text()).get(table, {})
    told = Told()
    for outcome in outcomes:
        reason = _reason(outcome, judged)
        status = "judged" if outcome.status == "failed" and reason else outcome.status
        of = "certain" if outcome.certain else "not certain"
        _count(told.rates, of, status)
        if outcome.group:
            _count(told.groups, outcome.group, status)
        if status == "judged":
            told.judged[outcome.id] = reason
        elif status == "not played":
            told.not_played.setdefault(outcome.got, []).append(outcome.id)
        elif status == "failed":
            mark = "" if outcome.certain else " (not certain)"
            line = f"{outcome.id}{mark}: expected {outcome.expected}; got {outcome.got}"
            told.problems.append(line)
        elif outcome.id in judged:
            told.judged_but_passed.append(outcome.id)
    _write(table, told, with_problems=with_problems)
    return told


def _reason(outcome: Outcome, judged: dict[str, Any]) -> str:
    """Returns why an outcome is right though it is not the table's; empty: it is not judged.

    An entry may say of what it does not hold: ``unless`` stands in what is otherwise.
    """
    for form, entry in judged.items():
        if fnmatchcase(outcome.id, form):
            given = entry if isinstance(entry, dict) else {"why": entry}
            unless = str(given.get("unless", ""))
            return "" if unless and unless in outcome.got else str(given["why"])
    return ""


def _write(table: str, told: Told, *, with_problems: bool) -> None:
    lines = [f"== {table}", *(told.problems if with_problems else ())]
    lines += [f"{table}, {of}: {dict(counts)}" for of, counts in told.rates.items()]
    lines += [f"  {of}: {dict(counts)}" for of, counts in told.groups.items()]
    lines += [f"not played, {why}: {' '.join(ids)}" for why, ids in told.not_played.items()]
    lines += [f"judged {id_}: {why}" for id_, why in told.judged.items()]
    lines += [f"judged, and passed: {id_}" for id_ in told.judged_but_passed]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def of_result(told: Told) -> dict[str, Any]:
    """Returns what the committed result says of a table."""
    return {
        "rates": told.rates,
        **({"groups": told.groups} if told.groups else {}),
        "judged": told.judged,
        "not_played": {why: len(ids) for why, ids in told.not_played.items()},
    }


def joined(text: object) -> str:
    """Returns a text that stands in a table as it is, or in parts that are repeated."""
    if isinstance(text, str):
        return text
    assert isinstance(text, Iterable)
    return "".join(p if isinstance(p, str) else p["repeat"] * p["times"] for p in text)


def _certain(case: dict[str, Any]) -> bool:
    return bool(case.get("certain", True))


def _count(counts: dict[str, dict[str, int]], of: str, status: str) -> None:
    counter = counts.setdefault(of, Counter())
    counter[status] += 1


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.replace(sys.executable, "python").replace(f"{ROOT}/", "").split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def main_of(
    file: str,
    doc: str | None,
    table: str,
    play: Callable[[dict[str, Any]], Outcome],
    *,
    what: str,
    ends_after_s: float,
) -> int:
    """Plays a table and writes its result. Returns 0 if all cases are as the table has them, or judged.

    Args:
        file: of the program, whose name the result has. doc: its description.
        what: the result's.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this in their id; writes no result")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    check = HandCheck(file)
    ends_after(ends_after_s)
    outcomes = [play(case) for case in cases(table) if options.only in case["id"]]
    told = tell(table, outcomes, with_problems=bool(options.only))
    return 0 if options.only else check.write(what, told.problems, **{table: of_result(told)})
