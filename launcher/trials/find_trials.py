"""Finds trials by `experiment/trial`, `experiment` (its newest) or a folder, and sweeps by
`experiment/sweep`.

For every verb that takes TRIAL. Searches the file roots of the known clusters; reads only a trial's
record.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.sites import places
from realsys.api.errors import ConfigError, NoSuchTrial
from realsys.trial.folders import absolute_root, check_ours, own_root, top_of
from realsys.trial.records import TrialFiles, TrialRecord

_FOLDER = ("/", "./", "../", "~")


def find_trial(name: str, *, cluster: str | None = None) -> TrialFiles:
    """Finds the trial that ``name`` refers to.

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
    if not fitting and (sweep := find_sweep(name, cluster=cluster)):
        raise NoSuchTrial(
            f"{name!r} is a sweep of {len(sweep)} trials, not a trial",
            where=str(sweep[0].root.parent),
            fix=f"name one of them, e.g. {trial_name(sweep[0])}; all of them: realsys status {name}",
        )
    if not fitting:
        names = [trial_name(files) for files in known]
        raise NoSuchTrial(
            f"no trial {name!r}" if slash else f"no trial of experiment {name!r}",
            where=", ".join(file_roots(cluster)),
            fix=_suggestion(name, names),
        )
    return max(fitting, key=created_at)


def _suggestion(name: str, known: Sequence[str]) -> str:
    """Suggests the names that were probably meant by an unknown one, as a sentence (pure)."""
    if not known:
        return "launch one: realsys launch EXPERIMENT"
    if name.startswith(_FOLDER):
        return "name a folder that holds a plan.json, or EXPERIMENT/TRIAL; all of them: realsys ls"
    whole = "/" in name.strip("/")
    ends = {} if whole else {n.partition("/")[2]: n for n in known}  # the last ones are the newest
    candidates = known if whole else [*{n.partition("/")[0] for n in known}, *ends]
    folded = {c.casefold(): c for c in candidates}
    near = difflib.get_close_matches(name.strip("/").casefold(), folded, n=3, cutoff=0.6)
    words = [repr(ends.get(folded[n], folded[n])) for n in near]
    meant = f"did you mean {' or '.join(words)}? All" if words else "all"
    return f"{meant} of them: realsys ls"


def find_own_trial(name: str, *, cluster: str | None = None, or_copy: bool = False) -> TrialFiles:
    """Finds a trial for verbs that act on its records.

    Args:
        or_copy: accept a copy of another trial's folder: for `rm`.
    Raises:
        NoSuchTrial: as find_trial.
        ClusterError: another user wrote those records, or could have.
        TrialError: the folder is a copy of another trial's.
    """
    from launcher.trials.copies import refuse_copy

    files = find_trial(name, cluster=cluster)
    check_ours(files)
    if not or_copy:
        refuse_copy(files, moved_too=False)
    return files


def find_sweep(name: str, *, cluster: str | None = None) -> list[TrialFiles]:
    """Finds the trials of the sweep ``experiment/sweep``, in order; empty if there is no such sweep.

    A trial of exactly that name takes precedence; then the result is empty.
    """
    experiment, slash, sweep = name.strip("/").partition("/")
    if not slash or _is_folder(name):
        return []
    folders: dict[Path, list[TrialFiles]] = {}
    for files in all_trials(cluster=cluster):
        if files.root.parent.name != experiment:
            continue
        if files.root.name == sweep:
            return []
        numbered = re.fullmatch(re.escape(sweep) + r"-\d+", files.root.name)
        if numbered and sweep_of(files) == sweep:
            folders.setdefault(files.root.parent, []).append(files)
    newest = max(folders.values(), key=lambda trials: created_at(trials[0]), default=[])
    return sorted(newest, key=lambda files: int(files.root.name.rpartition("-")[2]))


def sweep_of(files: TrialFiles) -> str:
    """Returns the name of the sweep that launched the trial; empty if none did."""
    record = _record(files)
    return record.sweep if record else ""


def point_of(files: TrialFiles) -> dict[str, str]:
    """Returns the trial's values in its sweep."""
    record = _record(files)
    return dict(record.point) if record else {}


def all_trials(*, cluster: str | None = None) -> Iterator[TrialFiles]:
    """Yields this user's trials in all known file roots."""
    for root in file_roots(cluster):
        runs = Path(root) / "runs" / places.user_name()
        for plan in sorted(runs.glob("*/*/plan.json")):
            if _is_ours(plan.parent):
                yield TrialFiles(plan.parent)


def _is_ours(folder: Path) -> bool:
    """Whether the folder belongs to this user or root: in a shared root another user can create one in
    our name.
    """
    try:
        return folder.lstat().st_uid in (os.getuid(), 0)
    except OSError:
        return False


def trial_name(files: TrialFiles) -> str:
    """Returns ``experiment/trial``."""
    return f"{files.root.parent.name}/{files.root.name}"


def created_at(files: TrialFiles) -> float:
    """Returns when the trial was launched, in seconds since the epoch."""
    if record := _record(files):
        return record.created_at
    try:
        return files.root.stat().st_mtime
    except OSError:
        return 0.0


def next_free_name(experiment_folder: Path, stem: str = "run") -> str:
    """Returns ``run<N>`` with the N after the highest one taken, by a trial or by a sweep."""
    taken: Sequence[int] = [0]
    if experiment_folder.is_dir():
        pattern = re.compile(rf"{stem}(\d{{1,9}})(-\d+)?")
        matches = (pattern.fullmatch(p.name) for p in experiment_folder.iterdir())
        taken = [0, *(int(m[1]) for m in matches if m)]
    return f"{stem}{max(taken) + 1}"


def _record(files: TrialFiles) -> TrialRecord | None:
    """Reads the trial's record; None if it is missing or unreadable."""
    from realsys.trial.trial_reader import TrialReader  # a plan where nothing has run starts sooner

    return TrialReader(files).record(TrialRecord, files.record)


def _is_folder(name: str) -> bool:
    if not name.startswith(_FOLDER):
        return False
    return (Path(name).expanduser() / "plan.json").is_file()


# ---- where trials may be --------------------------------------------------------------------
# A whole cluster spec is read only where nothing less does: one with mistakes must not hide trials, and the
# classes of a spec take long to import.


def file_roots(wanted: str | None = None) -> list[str]:
    """Lists the roots where trials may be: of the given cluster, else of every known one.

    Raises:
        ConfigError: no such cluster, or mistakes in its spec (all of them).
    """
    if wanted:
        return _with_shared([_of_spec(wanted)])
    if fixed := os.environ.get("REALSYS_FILE_ROOT"):
        return _with_shared([_own(fixed)])
    if name := os.environ.get("REALSYS_CLUSTER"):
        plain = places.plain_file_root(places.spec_files().get(name, ""))
        return _with_shared([_own(plain) if plain else _of_spec(name)])
    return _with_shared([*_of_all_specs(), *places.remembered_file_roots()])


def _of_all_specs() -> Iterator[str]:
    """Skips specs whose root can't be read: `plan --cluster` reports it."""
    for path in places.spec_files().values():
        try:
            plain = places.plain_file_root(path)
            yield _own(plain) if plain else _of_spec(path)
        except ConfigError:
            continue


def _of_spec(wanted: str) -> str:
    from launcher.sites.clusters import find_cluster

    return find_cluster(wanted).file_root


def _own(root: str) -> str:
    return own_root(absolute_root(root), places.user_name())


def _with_shared(roots: Sequence[str]) -> list[str]:
    """Removes repeats, and adds to a user's own root the shared root around it, with its older trials."""
    return list(dict.fromkeys(r for root in roots for r in (root, str(top_of(Path(root))))))
