"""The verb that removes trials: rm. Asks for confirmation; launcher/control/remove.py removes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.trials.trial_view import TrialView
    from realsys.trial.records import TrialFiles


def rm(
    trial: o.TrialOrSweep = None,
    older_than: Annotated[
        str | None,
        o.option(
            "--older-than TIME",
            "All my trials that ended before TIME: 30d (days ago), 12h, or a time.",
        ),
    ] = None,
    yes: Annotated[bool, o.option("--yes -y", "Don't ask.")] = False,
    cluster: o.Cluster = None,
) -> int:
    """Remove ended trials with their checkpoints, logs and keys; asks first."""
    from launcher.cli.verbs.sweep_verbs import agrees
    from launcher.control.remove import remove
    from launcher.terminal import output
    from launcher.trials.find_trials import trial_name
    from realsys.api.errors import RealsysError
    from realsys.planner.memory.memory_messages import size

    if (trial is None) == (older_than is None):
        raise typer.BadParameter("give either a TRIAL or --older-than TIME")
    found = _named(trial, cluster) if trial is not None else _older(older_than or "", cluster)
    if not found:
        output.say("none of your trials ended before that time; nothing was done")
        return ExitCode.OK
    title = "trials to remove, with their checkpoints"
    lines = [f"{view.trial}  {view.state.value}  {view.folder}" for _, view in found]
    if not agrees(title, lines, doing="removing", order="Remove", yes=yes):
        return ExitCode.OK
    status, total = int(ExitCode.OK), 0
    # A sweep's first trial holds files that the others use, so it is removed last.
    for files, _ in reversed(found):
        try:
            freed = remove(files)
        except RealsysError as error:
            output.error(error, as_json=False)
            status = status or error.exit_code
            continue
        total += freed.num_bytes
        keys = f"{freed.keys} key{'s' * (freed.keys != 1)} in the store"
        if freed.keys is None:
            keys = "its store ended with its job"
        what = f"{freed.files} files, {size(freed.num_bytes)}, {keys}"
        output.say(f"removed {trial_name(files)}: {what}")
    if len(found) > 1:
        output.say(f"freed {size(total)} in all")
    return status


def _named(name: str, cluster: str | None) -> list[tuple[TrialFiles, TrialView]]:
    """Finds the trial, or all trials of the sweep, which must all have ended."""
    from launcher.control.stop_several import running
    from launcher.trials.find_trials import find_own_trial, find_sweep
    from launcher.trials.status import trial_views
    from realsys.api.errors import TrialIsLive

    if not (sweep := find_sweep(name, cluster=cluster)):
        files = find_own_trial(name, cluster=cluster, or_copy=True)
        return [(files, trial_views([files])[0])]
    if busy := running(sweep):
        raise TrialIsLive(
            f"{len(busy)} of the sweep's {len(sweep)} trials have not ended, e.g. {busy[0][1].trial}",
            where=str(sweep[0].root.parent),
            fix=f"end them first: realsys stop {name}",
        )
    return list(zip(sweep, trial_views(sweep), strict=True))


def _older(text: str, cluster: str | None) -> list[tuple[TrialFiles, TrialView]]:
    """Finds the user's trials that ended before a time, in the order of their folders.

    A sweep's first trial comes before the others.
    """
    from datetime import datetime

    from launcher.control.remove import last_activity
    from launcher.trials.find_trials import all_trials
    from launcher.trials.merged_logs import since_stamp
    from launcher.trials.status import trial_views
    from realsys.trial.trial_state import State

    stamp = since_stamp(text, datetime.now(), where="--older-than")
    limit = datetime.fromisoformat(stamp).timestamp()
    trials = list(all_trials(cluster=cluster))
    pairs = zip(trials, trial_views(trials), strict=True)
    return [(f, v) for f, v in pairs if v.state in State.final() and last_activity(f, v) < limit]
