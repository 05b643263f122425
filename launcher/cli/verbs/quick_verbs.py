"""`status` and `ls`, which people and scripts call again and again, and how to run them without typer.

Importing typer takes longer than what these two do. Only command lines that need no interpretation are run
without it; for all others, and for the help, they are declared in inspect_verbs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from realsys.observability.predicted import PredictedRow
    from realsys.trial.records import TrialFiles


def quick_verb(words: Sequence[str]) -> Callable[[], int] | None:
    """Returns what the words of one of the two ask for; None if typer must say."""
    verb, *others = words
    options: dict[str, Any] = {"json": False, "cluster": None}
    options |= {"report": False, "trial": None} if verb == "status" else {}
    left = iter(others)
    for word in left:
        is_flag = word in ("--json", "--report")
        name = word[2:] if is_flag or word == "--cluster" else "trial"
        value = next(left, "") if word == "--cluster" else word
        if options.get(name, "no such option"):  # or it is given twice
            return None
        if not is_flag and value[:1] in ("", "-"):
            return None
        options[name] = True if is_flag else value
    return partial(show_status if verb == "status" else list_trials, **options)


def show_status(trial: str | None, *, report: bool, json: bool, cluster: str | None) -> int:
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
