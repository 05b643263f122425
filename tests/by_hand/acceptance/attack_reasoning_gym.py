"""Plays the corpus of exploits, and right answers in many forms, on every scorer of reasoning-gym.

`python tests/by_hand/acceptance/attack_reasoning_gym.py [--only NAME,…]`, half an hour on two cores. For
each scorer: exploits paid above an honest wrong answer, programs run, hangs, and the share of right answers
in common forms that are refused. Scorers that pay, or that refuse more than 1 %, have to stand in
realsys/data/sources/reasoning_gym_questions.py; no other may.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support")]

from by_hand import HandCheck  # noqa: E402

from realsys.data.sources.reasoning_gym_questions import generators  # noqa: E402
from realsys.rewards.attack.attack_report import AttackReport, report_of, shown  # noqa: E402
from realsys.rewards.attack.attack_scoring import AttackProcess  # noqa: E402
from realsys.rewards.attack.gym_attack import gym_attack  # noqa: E402

WHAT = "exploits and right answers in many forms on every scorer of reasoning-gym"
MOST_REFUSED = 0.01
CPU_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="generators, with commas; writes no result")
    only = [name for name in parser.parse_args().only.split(",") if name]
    check = HandCheck(__file__)
    rows: dict[str, Any] = {}
    with AttackProcess("reasoning_gym", {}, cpu_s=CPU_S, deadline_s=120.0) as process:
        for name in only or generators():
            began = time.monotonic()
            try:
                attack = gym_attack(name, mark=str(process.mark))
            except Exception as error:  # a generator that wants arguments
                rows[name] = {"not_played": f"{type(error).__name__}: {error}"[:200]}
                say(f"{name} {rows[name]}")
                continue
            rows[name] = row_of(report_of(attack, process.scores(attack)))
            say(f"{name} {rows[name]} {time.monotonic() - began:.0f} s")
    problems = list(problems_of(rows))
    if only:
        say("\n".join(problems or ["all held"]))
        return 1 if problems else 0
    return check.write(WHAT, problems, scorers=rows)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def row_of(report: AttackReport) -> dict[str, Any]:
    """What is kept of the attack on one scorer."""
    honest = sum(num for name, num in report.counts.items() if name.startswith("honest"))
    paid = {
        f.answer.kind: [f.score.value, f.compared, shown(f.answer.response)] for f in report.paid
    }
    return {
        "exploits": sum(n for name, n in report.counts.items() if name.startswith("exploit")),
        "paid": paid,
        "pays_all": report.pays_all,
        "programs_run": len(report.ran),
        "hangs": len(report.hung),
        "without_score": len(report.no_score),
        "raised": report.num_raised,
        "honest": honest,
        "refused": len(report.refused) / honest if honest else None,
        "refused_forms": sorted({f.answer.what for f in report.refused}),
    }


def problems_of(rows: dict[str, Any]) -> list[str]:
    """What doesn't hold."""
    from realsys.data.sources.reasoning_gym_questions import PAYING, REFUSING, UNFIT

    found = []
    for name, row in rows.items():
        if "not_played" in row:
            if name not in UNFIT:
                found.append(f"{name}: not played: {row['not_played']}")
            continue
        if row["programs_run"] or row["hangs"]:
            found.append(f"{name}: {row['programs_run']} programs run, {row['hangs']} hangs")
        if bool(row["paid"] or row["pays_all"]) != (name in PAYING):
            found.append(f"{name}: pays {sorted(row['paid'])}, PAYING says {PAYING.get(name)!r}")
        if ((row["refused"] or 0) > MOST_REFUSED) != (name in REFUSING):
            found.append(f"{name}: refuses {row['refused']}, REFUSING says {REFUSING.get(name)!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
