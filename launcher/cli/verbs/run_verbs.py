"""The verbs that start, stop and wait for runs: launch, plan, resume, replay, stop, wait.

They parse, call and print; planning.py, submit.py, stop.py and render.py do the work and are imported
when a verb runs, so that the command line itself starts quickly. All but `plan` return an exit status.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.trials.submission import Submission
    from launcher.trials.trial_view import TrialView
    from realsys.trial.records import TrialFiles

START_TIMEOUT_S = 60.0
START_AGE_S = 0.5  # maximum age of Slurm's answer during a start
QUEUE_S = 2.0  # a job that has not started by then may wait for hours; a free cluster takes less


@o.with_job_options
def launch(
    experiment: o.Experiment,
    overrides: o.Overrides = None,
    config: o.Config = None,
    trial: o.TrialName = None,
    cluster: o.Cluster = None,
    imports: o.Imports = None,
    detach: o.Detach = False,
    no_snapshot: o.NoSnapshot = False,
    sweep: o.Sweep = False,
    parallel: o.Parallel = None,
    *,
    job: o.Job,
) -> int:
    """Start an experiment and watch it; Ctrl-C leaves it running."""
    from launcher.plan.plan_view import chosen_lines
    from launcher.slurm.plan_lines import limit_lines
    from launcher.submit.planning import LaunchOptions
    from launcher.submit.submit import launch_trial, launch_warnings
    from launcher.terminal import output

    words, command, snapshot = overrides or (), ("realsys", *sys.argv[1:]), not no_snapshot
    options = LaunchOptions(
        config=config,
        cluster=cluster,
        imports=imports or (),
        job=job,
        snapshot=snapshot,
        fetch=output.say,
    )
    if sweep:
        from launcher.cli.verbs.sweep_verbs import launch_sweep

        return launch_sweep(
            experiment, words, name=trial, parallel=parallel, detach=detach, **options
        )
    if parallel is not None:
        raise typer.BadParameter("--parallel needs --sweep")
    plan, files = launch_trial(experiment, words, trial=trial, command=command, **options)
    output.warn(*launch_warnings(plan))
    output.data(plan.trial)
    output.say(*limit_lines(plan), *chosen_lines(plan.chosen))
    return _detached(files, plan.trial) if detach else _attached(files, plan.trial)


@o.with_job_options
def plan(
    experiment: o.Experiment,
    overrides: o.Overrides = None,
    config: o.Config = None,
    trial: o.TrialName = None,
    cluster: o.Cluster = None,
    imports: o.Imports = None,
    json: o.Json = False,
    check: Annotated[
        bool, o.option("--check", "Also ask Slurm whether it would accept the job.")
    ] = False,
    no_snapshot: o.NoSnapshot = False,
    search: Annotated[
        bool, o.option("--search", "Search for better layouts and workers of every call.")
    ] = False,
    gpus: Annotated[int | None, o.option("--gpus", "With --search: number of GPUs.", min=1)] = None,
    within: Annotated[
        float, o.option("--within", "With --search: time limit in seconds.", min=0.1)
    ] = 20.0,
    profile: Annotated[
        list[str] | None, o.option("--profile TRIAL", "Take times from that run; repeatable.")
    ] = None,
    device: Annotated[
        str | None, o.option("--device", "Take times from formulas, e.g. for h100.")
    ] = None,
    *,
    job: o.Job,
) -> None:
    """Show what `launch` would do: phases, tasks, calls, files. Starts nothing."""
    from launcher.cli.verbs.quick_verbs import show_plan

    if gpus is not None and not search:
        raise typer.BadParameter("--gpus needs --search")
    show_plan(
        experiment,
        *(overrides or ()),
        json=json,
        cluster=cluster,
        check=check,
        search_s=within if search else None,
        gpus=gpus,
        profiles=profile or (),
        device=device,
        trial=trial,
        config=config,
        imports=imports or (),
        job=job,
        snapshot=not no_snapshot,
    )


@o.with_job_options
def resume(
    trial: o.Trial,
    overrides: o.Overrides = None,
    config: o.Config = None,
    detach: o.Detach = False,
    cluster: o.Cluster = None,
    *,
    job: o.Job,
) -> int:
    """Resume a stopped, failed or lost trial, optionally with other limits, lengths or resources."""
    from dataclasses import replace

    from launcher.submit.node_exclusion import exclusion_hints
    from launcher.submit.remake import RequestedChanges
    from launcher.submit.submit import resubmit, resume_warnings
    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial, trial_name

    files = find_trial(trial, cluster=cluster)
    name = trial_name(files)
    if job.exclude is None:
        output.warn(*exclusion_hints(files, name))
    warnings = resume_warnings(files)
    submission = resubmit(
        files,
        exclude=job.exclude,
        changes=RequestedChanges(
            words=overrides or (), config=config, job=replace(job, exclude=None)
        ),
        command=("realsys", *sys.argv[1:]),
        report=output.say,
    )
    output.warn(*warnings)
    output.data(name)
    return _detached(files, name, submission) if detach else _attached(files, name)


def replay(
    trial: o.Trial,
    name: Annotated[str | None, o.option("--trial", "Name of the replay; default: run<N>.")] = None,
    detach: o.Detach = False,
    cluster: o.Cluster = None,
) -> int:
    """Repeat the training of an asynchronous trial on its recorded samples; compare bit for bit."""
    from launcher.control.replay_trial import compare, plan_replay, replay_warnings
    from launcher.submit.submit import submit
    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial, trial_name
    from realsys.api.plan import read_plan

    original = find_trial(trial, cluster=cluster)
    plan = plan_replay(original, trial=name)
    imports = read_plan(original.plan).imports  # of the copy that the original runs, if it has one
    files = submit(plan, command=("realsys", *sys.argv[1:]), imports=imports)
    output.warn(*replay_warnings(original))
    output.data(plan.trial)
    if detach:
        return _detached(files, plan.trial)
    code = _attached(files, plan.trial)
    if code != ExitCode.OK:
        return code
    found = compare(original, files)
    compared_with = trial_name(original)
    for role, same in found.same_weights.items():
        words = {
            True: "the same weights, bit for bit, as",
            False: "DIFFERENT WEIGHTS from",
            None: "weights of another step than",
        }
        output.say(f"{role}: {words[same]} {compared_with}")
    output.say(
        f"{found.steps} steps: " + (found.first_difference or "the same metrics, bit for bit")
    )
    return ExitCode.OK if found.is_exact else ExitCode.RUN_FAILED


def stop(
    trial: o.TrialOrSweep = None,
    grace: Annotated[
        float, o.option("--grace", "Seconds for the current step to finish.", min=0)
    ] = 60.0,
    everything: Annotated[
        bool, o.option("--all", "All my running and queued trials; asks first.")
    ] = False,
    yes: Annotated[bool, o.option("--yes -y", "Don't ask.")] = False,
    assume_ended: Annotated[
        bool,
        o.option("--assume-ended", "I know that it has ended, though nothing of it can be seen."),
    ] = False,
    cluster: o.Cluster = None,
) -> int:
    """Stop a trial, or all of a sweep, after the current step; leaves no process behind."""
    from launcher.control.stop import stop as stop_trial
    from launcher.terminal import output
    from launcher.trials.find_trials import all_trials, find_sweep, find_trial
    from realsys.trial.trial_state import State

    if (trial is None) != everything:
        raise typer.BadParameter("give either a TRIAL or --all")
    several = (
        list(all_trials(cluster=cluster)) if trial is None else find_sweep(trial, cluster=cluster)
    )
    if assume_ended:
        if trial is None or several:
            raise typer.BadParameter("--assume-ended takes a single TRIAL")
        from launcher.control.assume_end import assume_end

        view = assume_end(find_trial(trial, cluster=cluster))
        output.say(f"{view.trial} is {view.state.value}; resume it: realsys resume {view.trial}")
        return ExitCode.OK
    if trial is None or several:
        from launcher.cli.verbs.sweep_verbs import stop_trials

        return stop_trials(several, grace_s=grace, yes=yes)
    report = stop_trial(find_trial(trial, cluster=cluster), grace_s=grace, on_action=output.say)
    view = report.view
    if report.was_over:
        output.say(f"{view.trial} is {view.state.value}; nothing runs, nothing was done")
    else:
        is_done = view.state is State.COMPLETED
        how = "" if is_done else f"; resume it: realsys resume {view.trial}"
        output.say(f"{view.trial} is {view.state.value}{how}")
    return ExitCode.OK


def wait(
    trial: o.Trial,
    timeout: Annotated[
        float | None,
        o.option("--timeout", "Give up after this many seconds (exit status 7).", min=0),
    ] = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
    """Wait until a trial has ended; the exit status is its result."""
    from launcher.terminal import output
    from launcher.trials.await_end import await_end
    from launcher.trials.find_trials import find_trial
    from launcher.trials.render import exit_code, summary

    files = find_trial(trial, cluster=cluster)
    view = await_end(files, timeout_s=timeout, warn=output.warn)
    if json:
        output.document(trial=view)
    else:
        output.say(*summary(view, files))
    return exit_code(view)


def _attached(files: TrialFiles, trial: str) -> int:
    """Shows the run until it has ended, or until Ctrl-C."""
    from launcher.terminal import output

    output.say(f"folder {files.root}")
    output.say(f"Ctrl-C leaves it running; stop it with: realsys stop {trial}")
    from launcher.trials.render import watch_until_over

    return watch_until_over(files, trial)


def _detached(files: TrialFiles, trial: str, mine: Submission | None = None) -> int:
    """Waits until the supervisor has taken its attempt or failed to.

    Raises:
        TrialIsLive: another submission's supervisor took it, not that of ``mine``.
    """
    from launcher.submit.submit import check_attempt_is_ours
    from launcher.terminal import output
    from launcher.trials.render import summary
    from realsys.trial.trial_state import State

    view = _await_attempt(files)
    if mine is not None:
        check_attempt_is_ours(files, view.attempt, mine)
    if view.state in (State.LOST, State.FAILED):
        output.say(*summary(view, files))
        return ExitCode.RUN_FAILED
    if view.state in (State.QUEUED, State.HELD):
        output.say(f"{trial} is {view.state.value}: {view.reason}")
    for verb in ("watch", "status", "logs", "stop"):
        output.say(f"  {verb:<7} realsys {verb} {trial}")
    return ExitCode.OK


def _await_attempt(files: TrialFiles) -> TrialView:
    """Returns the view once the supervisor has taken its attempt, the job waits, or on time-out."""
    from contextlib import closing

    from launcher.trials.await_end import views_until_over
    from launcher.trials.job_board import JobBoard
    from launcher.trials.status import StatusReader
    from launcher.trials.submission import read_submission
    from realsys.trial.trial_state import State

    submission = read_submission(files)
    before = submission.after_attempt if submission else 0
    soon = time.monotonic() + QUEUE_S
    with closing(StatusReader(files, board=JobBoard(max_age_s=START_AGE_S))) as reader:
        for view in views_until_over(reader, timeout_s=START_TIMEOUT_S, pause_s=0.1):
            taken = view.attempt > before or view.state not in State.live()
            if taken or (view.state in (State.QUEUED, State.HELD) and time.monotonic() > soon):
                break
    return view
