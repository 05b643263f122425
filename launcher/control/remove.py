"""Removes ended trials: their keys in name resolution, then their folders, for `realsys rm`.

``refusal`` decides what may be removed (pure). A folder is renamed first, so that a partly removed trial
is never found; its checkpoints and logs can't be recovered.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from launcher.submit.submit import translate_os_errors, trial_lock
from launcher.terminal.text import listed
from launcher.trials.copies import is_copy
from launcher.trials.find_trials import sweep_of, trial_name
from launcher.trials.status import StatusReader
from launcher.trials.submission import read_submission
from launcher.trials.trial_view import TrialView
from realsys.api.errors import ConfigError, RealsysError, StoreUnavailable, TrialError, TrialIsLive
from realsys.api.plan import LaunchPlan, read_plan
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.trial_store import has_job_etcd, open_trial_store
from realsys.trial.folders import check_ours
from realsys.trial.liveness import processes_of
from realsys.trial.records import TrialFiles
from realsys.trial.temporary_names import temporary_beside
from realsys.trial.trial_state import State

PREFIX = ".removed-"  # of a folder being removed; not a valid trial name
NAMED_AT_MOST = 5


@dataclass(frozen=True)
class RemovalResult:
    """What a removal freed. ``keys`` is None if the trial's store ended with its job."""

    files: int
    num_bytes: int
    keys: int | None


def refusal(view: TrialView, *, pids: Sequence[int], users: Sequence[str]) -> TrialError | None:
    """Returns why the trial must not be removed; None if it may be (pure).

    Args:
        pids: its processes on this host.
        users: trials that use files in its folder.
    """
    name = view.trial
    if view.state in State.live() or pids:
        runs = f"{name} is {view.state.value}"
        if view.state not in State.live():
            runs += f", but some of its processes still run here: pid {', '.join(map(str, pids))}"
        return TrialIsLive(runs, where=view.folder, fix=f"end it first: realsys stop {name}")
    if view.state is State.UNKNOWN:
        return TrialError(
            f"whether {name} runs is unknown: {view.reason or 'its records are insufficient'}",
            where=view.folder,
            fix=f"see `realsys status {name}`; if you know that nothing runs, remove the folder yourself",
        )
    if users:
        return TrialError(
            f"{name} holds files of its sweep that are needed by {listed(users, NAMED_AT_MOST)}",
            where=view.folder,
            fix="remove those first, or the whole sweep by its name",
        )
    return None


def dependent_trials(files: TrialFiles) -> list[str]:
    """Lists other trials of its sweep whose code, or whose job's script and output, are in its folder."""
    sweep = sweep_of(files)
    if not sweep:
        return []
    beside = (TrialFiles(plan.parent) for plan in sorted(files.root.parent.glob("*/plan.json")))
    return [
        trial_name(other)
        for other in beside
        if other.root != files.root and sweep_of(other) == sweep and _lies_in(other, files.root)
    ]


def _lies_in(files: TrialFiles, root: Path) -> bool:
    try:
        submission = read_submission(files)
    except RealsysError:  # its submission record is damaged, so it can't be ruled out
        return True
    folders = [Path(submission.folder)] if submission and submission.folder else []
    folders += [files.code] if files.code.is_symlink() else []
    # The root of trials may be named through a link, while a resolved link never is.
    home = root.resolve()
    return any(folder.resolve().is_relative_to(home) for folder in folders)


def remove(files: TrialFiles) -> RemovalResult:
    """Removes one trial.

    Raises:
        TrialIsLive, TrialError: it must not be removed.
        StoreError: its keys can't be removed; nothing was changed.
        ClusterError: the folder is another user's, or the file system refused.
    """
    check_ours(files)
    with trial_lock(files):
        with closing(StatusReader(files)) as reader:
            view = reader.view()
        pids = [process.pid for process in processes_of(files.root)]
        if problem := refusal(view, pids=pids, users=dependent_trials(files)):
            raise problem
        keys = _clear_keys(files, _plan_of(files))
        with translate_os_errors(files.root):
            home = files.root.resolve()  # a trial that was moved elsewhere may be linked here
            gone = temporary_beside(home, prefix=PREFIX)
            home.rename(gone)
            num_files, num_bytes = _counted(gone)
            shutil.rmtree(gone)
            if files.root.is_symlink():
                files.root.unlink()
    return RemovalResult(num_files, num_bytes, keys)


def _plan_of(files: TrialFiles) -> LaunchPlan:
    try:
        return read_plan(files.plan)
    except ConfigError as error:
        raise ConfigError(
            f"its keys in the store can't be found, since its plan can't be read: {error.what}",
            where=f"{files.plan}: {error.where}",
            fix=f"{error.fix}; or remove its folder alone, which leaves the keys: rm -r {files.root}",
        ) from error


def _clear_keys(files: TrialFiles, plan: LaunchPlan) -> int | None:
    if has_job_etcd(plan):
        return None
    if is_copy(files, plan):
        return 0  # the keys belong to the original trial
    try:
        with closing(open_trial_store(plan, None)) as store:
            return store.clear_subtree(TrialKeys.of(plan).root)
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"the keys of {plan.trial} can't be removed: {error.what}",
            where=error.where,
            fix=f"try again when the store answers; if it never will: rm -r {files.root}",
        ) from error


def _counted(folder: Path) -> tuple[int, int]:
    """Returns the number of files below a folder and their size on disk in bytes."""
    sizes = [
        os.lstat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    ]
    return len(sizes), sum(sizes)


def last_activity(files: TrialFiles, view: TrialView) -> float:
    """Returns the time of the trial's last activity: its end, or that of its newest log."""
    if view.ended_at is not None:
        return view.ended_at
    times = [path.stat().st_mtime for path in files.attempts.glob("*/logs/*.log")]
    return max([*times, view.started_at or 0.0, view.created_at or files.root.stat().st_mtime])
