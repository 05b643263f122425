"""Checks of `realsys doctor` on trial folders: which other users could replace or write them.

A launch checks the path from its file root to its own folder; these checks cover all of a user's trials
and the folders above the file root, which no launch checks. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from launcher.sites import places
from launcher.slurm.doctor.findings import Finding
from realsys.api.errors import ClusterError
from realsys.trial.folders import above, check_trial, top_of
from realsys.trial.records import TrialFiles

NAME, ABOVE = "folders", "folders above"
MOST = 1000  # trials examined


def folder_findings(root: str) -> Iterator[Finding]:
    """Checks this user's trials under ``root`` and the folders that contain ``root``."""
    own, user = Path(root), places.user_name()
    wrong: dict[str, ClusterError] = {}  # by folder: many trials share one
    for plan in islice((own / "runs" / user).glob("*/*/plan.json"), MOST):
        try:
            check_trial(TrialFiles(plan.parent))
        except ClusterError as error:
            wrong.setdefault(error.where, error)
    if wrong:
        first, *rest = wrong.values()
        more = f" (and {len(rest)} more folders)" if rest else ""
        yield Finding(NAME, False, first.what + more, first.fix)
    else:
        yield Finding(NAME, True, "no other user can replace or write your trials' folders")
    yield from _above(top_of(own))


def _above(top: Path) -> Iterator[Finding]:
    problems = above(top)
    if any(severe for _, severe in problems):
        what = next(sentence for sentence, severe in problems if severe)
        fix = "ask its owner for chmod +t, or use a file root elsewhere (REALSYS_FILE_ROOT)"
        yield Finding(ABOVE, False, what, fix)
    elif problems:
        yield Finding(ABOVE, True, "; ".join(sentence for sentence, _ in problems))
