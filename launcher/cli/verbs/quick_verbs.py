"""`status`, `ls` and `plan`, which people and scripts call again and again, and how to run them quickly.

Importing typer takes longer than what they do. Only command lines that need no interpretation are
run without it; for all others, and for the help, they are declared in inspect_verbs.py and run_verbs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.submit.planning import LaunchOptions
    from realsys.observability.predicted import PredictedRow
    from realsys.trial.records import TrialFiles


def quick_verb(words: Sequence[str]) -> Callable[[], int] | None:
    """Returns what the words of one of the three ask for; None if typer must say."""
    verb, *others = words
    known: dict[str, tuple[Callable[..., int], range, dict[str, Any]]] = {
        "status": (show_status, range(2), {"report": False}),
        "ls": (list_trials, range(1), {}),
        "plan": (show_plan, range(1, len(words)), {"trial": None}),
    }
    run, counts, own = known[verb]
    options: dict[str, Any] = {"json": False, "cluster": None, **own}
    arguments, given, left = list[str](), dict[str, Any](), iter(others)
    for word in left:
        name = word.removeprefix("--")
        if name == word:
            arguments.append(word)
        elif name in given or name not in options:
            return None
        else:
            given[name] = True if options[name] is False else next(left, "")
    values = [*arguments, *(value for value in given.values() if value is not True)]
    if len(arguments) not in counts or any(value[:1] in ("", "-") for value in values):
        return None
    return partial(run, *arguments, **{**options, **given})


def show_status(trial: str | None = None, *, report: bool, json: bool, cluster: str | None) -> int:
    """Prints a trial's state, a sweep as a table, or all trials."""
    if trial is None:
        return list_trials(json=json, cluster=cluster)
    from launcher.cli.tables import print_status, print_times
    from launcher.terminal import output
    from launcher.trials.find_trials import find_sweep, find_trial
    from launcher.trials.status import trial_view

    if sweep := find_sweep(trial, cluster=cluster):
        from launcher.cli.verbs.sweep_verbs import show_sweep

        return show_sweep(trial, sweep, json=json)
    files = find_trial(trial, cluster=cluster)
    view = trial_view(files, ages=True)
    times = _predicted_and_measured(files) if report else None
    if json:
        output.document(trial=view, **({"times": times} if times is not None else {}))
        return ExitCode.OK
    print_status(view)
    if times is not None:
        print_times(times)
    return ExitCode.OK


def _predicted_and_measured(files: TrialFiles) -> list[PredictedRow]:
    """Compares predicted and measured times; empty for a trial without a prediction."""
    from realsys.observability.events import read_events
    from realsys.observability.predicted import predicted_rows
    from realsys.trial.records import PredictionRecord
    from realsys.trial.trial_reader import read_bounded_record

    record = read_bounded_record(PredictionRecord, files.prediction)
    events = read_events(files.phase(files.root).events)
    return predicted_rows(record, events) if record else []


def list_trials(*, json: bool, cluster: str | None) -> int:
    """Prints all trials, newest first."""
    from launcher.cli.tables import print_trials
    from launcher.terminal import output
    from launcher.trials.find_trials import all_trials, created_at
    from launcher.trials.status import trial_views

    found = sorted(all_trials(cluster=cluster), key=created_at, reverse=True)
    views = trial_views(found)
    if json:
        output.document(trials=views)
    else:
        print_trials(views)
    return ExitCode.OK


def show_plan(
    experiment: str,
    *words: str,
    json: bool,
    check: bool = False,
    search_s: float | None = None,
    gpus: int | None = None,
    profiles: Sequence[str] = (),
    device: str | None = None,
    trial: str | None = None,
    **options: Unpack[LaunchOptions],
) -> int:
    """Prints the plan of a launch, or, with a time limit of a search, a better one."""
    from launcher.cli.plan_tables import print_plan
    from launcher.plan.memory_check import ModelsTooLarge
    from launcher.submit.planning import make_plan
    from launcher.terminal import output
    from realsys.api.plain import to_plain
    from realsys.api.plan import plan_hash, plan_text

    cluster = options.get("cluster")
    try:
        made = make_plan(experiment, words, trial=trial, fits_memory=search_s is None, **options)
    except ModelsTooLarge as refused:
        if not json:
            print_plan(refused.plan)
        raise
    if search_s is not None:
        from launcher.plan.plan_search import print_proposal, propose

        proposal = propose(
            made, gpus=gpus, profiles=profiles, device=device, cluster=cluster, within_s=search_s
        )
        if json:
            output.document(search=proposal)
        else:
            print_proposal(made, proposal)
        return ExitCode.OK
    to_plain(made)  # refuses what launch could not write
    if json:
        output.document(hash=plan_hash(plan_text(made)), plan=made)
    else:
        from launcher.plan.time_predictions import show_prediction

        print_plan(made)
        found = show_prediction(made, profiles=profiles, device=device, cluster=cluster)
        if made.job is not None:
            from launcher.slurm.plan_lines import plan_lines, time_limit_warning

            if found and (late := time_limit_warning(made, found.step_s)):
                output.warn(late)
            output.data(*plan_lines(made, plan_hash(plan_text(made))))
    if check:
        from launcher.slurm.plan_lines import check_plan

        for answer in check_plan(made):
            output.say(answer)
    return ExitCode.OK
