"""Parts of launch, status and stop for several trials: a sweep's, or all of the user's.

For run_verbs.py and inspect_verbs.py, imported when needed. Prints and asks; submit_sweep.py and
stop_several.py do the work.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Unpack

import typer

from launcher.control.stop_several import running, stop_several
from launcher.sites import places
from launcher.submit.planning import LaunchOptions
from launcher.submit.submit import launch_warnings
from launcher.submit.submit_sweep import PlannedSweep, make_trials, plan_sweep, submit_jobs
from launcher.terminal import output
from launcher.terminal.exit_codes import ExitCode
from launcher.terminal.text import listed
from launcher.trials.find_trials import point_of
from realsys.api.errors import ConfigError, TrialError
from realsys.trial.records import TrialFiles

MAX_NAMED = 20


def launch_sweep(
    experiment: str,
    words: Sequence[str],
    *,
    name: str | None,
    parallel: int | None,
    detach: bool,
    **options: Unpack[LaunchOptions],
) -> int:
    """Starts all trials of a sweep.

    On Slurm it returns once they are submitted. The local machine has no queue, so there this command
    runs them one after the other; Ctrl-C leaves the running one and names those that were not started
    (their folders exist, so ``resume`` starts each).
    """
    while True:
        planned = plan_sweep(experiment, words, name=name, parallel=parallel, **options)
        if detach and not planned.on_slurm:
            raise ConfigError(
                "--detach: on this machine a sweep's trials run one after the other, by this command",
                where="command line --detach",
                fix="leave --detach out, or name a Slurm cluster with --cluster (realsys clusters)",
            )
        try:
            imports = options.get("imports", ())
            trials = make_trials(planned, command=("realsys", *sys.argv[1:]), imports=imports)
            break
        except TrialError:
            if name is not None:  # else sweep<N> was taken a moment ago: try the next one
                raise
    output.warn(*dict.fromkeys(text for plan in planned.plans for text in launch_warnings(plan)))
    if options.get("cluster") is not None:
        places.remember_file_root(planned.plans[0].cluster.file_root)
    if not planned.on_slurm:
        output.data(planned.title)
        return _run_in_sequence(planned, trials)
    jobs = submit_jobs(planned, trials, parallel=parallel)
    output.data(planned.title)
    output.say(f"{len(trials)} trials, submitted as {_jobs_text(jobs)}")
    output.say(f"  table   realsys status {planned.title}")
    output.say(f"  stop    realsys stop {planned.title}")
    return ExitCode.OK


def _run_in_sequence(planned: PlannedSweep, trials: Sequence[TrialFiles]) -> int:
    """Runs the trials in sequence. A failed trial does not prevent the next one; a stopped one does."""
    from launcher.submit.submit import start_attempt, translate_os_errors
    from launcher.trials.render import watch_until_over
    from realsys.api.plan import plan_hash, plan_text

    output.say(f"{len(trials)} trials, one after the other; Ctrl-C leaves the running one")
    failed = False
    for i, (point, plan, files) in enumerate(
        zip(planned.points, planned.plans, trials, strict=True), 1
    ):
        output.say(f"\n{i} of {len(trials)}: {plan.trial}  {point}")
        with translate_os_errors(files.root):
            start_attempt(files, plan, plan_hash(plan_text(plan)))
        status = watch_until_over(files, plan.trial)
        if status in (ExitCode.INTERRUPTED, ExitCode.RUN_STOPPED):
            _report_unstarted([p.trial for p in planned.plans[i:]])
            return status
        failed = failed or status != ExitCode.OK
    output.say(f"\nthe table: realsys status {planned.title}")
    return ExitCode.RUN_FAILED if failed else ExitCode.OK


def _report_unstarted(names: Sequence[str]) -> None:
    if names:
        output.say(
            f"not started: {listed(names, MAX_NAMED)}.  start one: realsys resume {names[0]}"
        )


def _jobs_text(jobs: Sequence[str]) -> str:
    kind = "job array" if jobs[0].endswith("]") else "job"
    return f"{kind} {jobs[0]}" if len(jobs) == 1 else f"jobs {listed(jobs, MAX_NAMED)}"


def show_sweep(name: str, trials: Sequence[TrialFiles], *, json: bool) -> int:
    """Prints the `status` of a sweep."""
    from launcher.cli.tables import sweep_document, sweep_table
    from launcher.trials.status import trial_views

    rows = list(zip(map(point_of, trials), trial_views(trials), strict=True))
    if json:
        output.document(sweep=name, trials=sweep_document(rows))
    else:
        output.table(*sweep_table(rows))
    output.warn(*dict.fromkeys(note for _, view in rows for note in view.notes))
    return ExitCode.OK


def stop_trials(trials: Sequence[TrialFiles], *, grace_s: float, yes: bool) -> int:
    """Stops those of the trials that have not ended: a sweep's, or all of the user's."""
    found = running(trials)
    if not found:
        output.say("none of the trials is running or queued; nothing was done")
        return ExitCode.OK
    lines = [f"{view.trial}  {view.state.value}" for _, view in found]
    if not agrees("running and queued trials", lines, doing="stopping", order="Stop", yes=yes):
        return ExitCode.OK
    failed = stop_several(found, grace_s=grace_s, on_action=output.say)
    for error in failed.values():
        output.error(error, as_json=False)
    if failed:
        output.say(f"{len(found) - len(failed)} of {len(found)} stopped")
        return next(iter(failed.values())).exit_code
    output.say(f"all {len(found)} stopped; resume one: realsys resume {found[0][1].trial}")
    return ExitCode.OK


def agrees(title: str, lines: Sequence[str], *, doing: str, order: str, yes: bool) -> bool:
    """Lists trials and asks whether to go on, unless ``yes``; says so if nothing is done."""
    count = len(lines)
    output.say(f"{title}: {count}", *(f"  {line}" for line in lines[:MAX_NAMED]))
    if count > MAX_NAMED:
        output.say(f"  and {count - MAX_NAMED} more")
    if yes or is_confirmed(f"{doing} {count} trials", f"{order} them ({count})?"):
        return True
    output.say("nothing was done")
    return False


def is_confirmed(doing: str, question: str) -> bool:
    """Asks for confirmation on the terminal; without one, raises with the command that needs none."""
    if not sys.stdin.isatty():
        command = shlex.join(["realsys", *sys.argv[1:], "--yes"])
        raise typer.BadParameter(f"{doing} needs confirmation, but there is no terminal: {command}")
    return typer.confirm(question, err=True)
