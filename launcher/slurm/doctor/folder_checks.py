"""What `realsys doctor` says of the folders that trials lie in: who could exchange or write them.

A launch refuses what is wrong from its file root down to its own folder; here all of a user's trials are
looked at, and the folders above the file root, which no launch judges. Nothing is changed.
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
MOST = 1000  # trials looked at


def folder_findings(root: str) -> Iterator[Finding]:
    """Of the trials of this user under ``root``, and of what ``root`` lies in."""
    own, user = Path(root), places.user_name()
    wrong: dict[str, ClusterError] = {}  # by folder: many trials lie in the same
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
        yield Finding(NAME, True, "nobody else can exchange or write your trials' folders")
    yield from _above(top_of(own))


def _above(top: Path) -> Iterator[Finding]:
    told = above(top)
    if any(severe for _, severe in told):
        what = next(sentence for sentence, severe in told if severe)
        fix = "ask its owner for chmod +t, or use a file root elsewhere (REALSYS_FILE_ROOT)"
        yield Finding(ABOVE, False, what, fix)
    elif told:
        yield Finding(ABOVE, True, "; ".join(sentence for sentence, _ in told))
