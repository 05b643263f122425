"""Finds trials by what a user types: `experiment/trial`, `experiment` (its newest), or a folder.

For every verb that takes TRIAL. Looks under the file roots of the known clusters; reads a trial's
creation time and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher import places
from launcher.clusters import file_roots
from realsys.api.errors import NoSuchTrial, RealsysError, did_you_mean
from realsys.api.trial import TrialFiles, TrialRecord, read_record


def find_trial(name: str, *, cluster: str | None = None) -> TrialFiles:
    """The trial that ``name`` means.

    Raises:
        NoSuchTrial: with the nearest names.
    """
    if _is_folder(name):
        return TrialFiles(Path(name).resolve())
    experiment, slash, trial = name.strip("/").partition("/")
    known = list(all_trials(cluster=cluster))
    fitting = [
        files
        for files in known
        if files.root.parent.name == experiment and (not slash or files.root.name == trial)
    ]
    if not fitting:
        names = [trial_name(files) for files in known] or ["none yet"]
        candidates = names if slash else [n.partition("/")[0] for n in names]
        raise NoSuchTrial(
            f"no trial {name!r}" if slash else f"no trial of experiment {name!r}",
            where=", ".join(file_roots(cluster)),
            fix="launch one: realsys launch EXPERIMENT"
            if not known
            else f"{did_you_mean(name, candidates)} All of them: realsys ls",
        )
    return max(fitting, key=created_at)


def all_trials(*, cluster: str | None = None) -> Iterator[TrialFiles]:
    """This user's trials in all known file roots."""
    for root in file_roots(cluster):
        runs = Path(root) / "runs" / places.user_name()
        for plan in sorted(runs.glob("*/*/plan.json")):
            yield TrialFiles(plan.parent)


def trial_name(files: TrialFiles) -> str:
    """``experiment/trial``."""
    return f"{files.root.parent.name}/{files.root.name}"


def created_at(files: TrialFiles) -> float:
    """When it was launched, in seconds since the epoch."""
    try:
        if record := read_record(TrialRecord, files.record):
            return record.created_at
    except (RealsysError, OSError):
        pass
    try:
        return files.root.stat().st_mtime
    except OSError:
        return 0.0


def next_free_name(experiment_folder: Path) -> str:
    """``run<N>`` with the next N after the highest one taken."""
    taken: Sequence[int] = [0]
    if experiment_folder.is_dir():
        matches = (re.fullmatch(r"run(\d{1,9})", p.name) for p in experiment_folder.iterdir())
        taken = [0, *(int(m[1]) for m in matches if m)]
    return f"run{max(taken) + 1}"


def _is_folder(name: str) -> bool:
    if not name.startswith(("/", "./", "../", "~")):
        return False
    return (Path(name).expanduser() / "plan.json").is_file()
