"""The verbs that inspect: status, watch, explain, logs, ls, show, graph, report, experiments.

They read the records of a trial and work from any terminal, also after the launching one has closed. Those
that can end in several ways return their exit status; `status` of a failed run succeeds.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from realsys.api.dataflow import DataflowGraph
    from realsys.trial.records import TrialFiles


def status(
    trial: o.TrialOrSweep = None,
    report: Annotated[
        bool, o.option("--report", "Also the time of each call, predicted and measured.")
    ] = False,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
    """Show a trial's state, progress and workers, or a sweep as a table; without a name, all my trials."""
    from launcher.cli.verbs.quick_verbs import show_status

    return show_status(trial, report=report, json=json, cluster=cluster)


def ls(json: o.Json = False, cluster: o.Cluster = None) -> int:
    """List all my trials, newest first."""
    from launcher.cli.verbs.quick_verbs import list_trials

    return list_trials(json=json, cluster=cluster)


def watch(trial: o.Trial, cluster: o.Cluster = None) -> int:
    """Attach the live view to a trial; the exit status is its result."""
    from launcher.trials.find_trials import find_trial, trial_name
    from launcher.trials.render import watch_until_over

    files = find_trial(trial, cluster=cluster)
    return watch_until_over(files, trial_name(files))


def logs(
    trial: o.Trial,
    workers: Annotated[
        str, typer.Argument(help="E.g. model_worker or 'model_worker/*'; default: all.")
    ] = "",
    follow: Annotated[bool, o.option("--follow -f", "Keep printing new lines.")] = False,
    grep: Annotated[str, o.option("--grep", "Only lines with this regular expression.")] = "",
    attempt: Annotated[
        int | None, o.option("--attempt", "One attempt; default: all.", min=1)
    ] = None,
    since: Annotated[
        str, o.option("--since TIME", "Only lines since TIME: 10m, 2h, or a time.")
    ] = "",
    tail: Annotated[int | None, o.option("--tail -n N", "Only the last N lines.", min=0)] = None,
    first_error: Annotated[
        bool, o.option("--first-error", "Only the first failure, with its last lines.")
    ] = False,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
    """Print the workers' logs, merged, each line with its worker."""
    from datetime import datetime

    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial, trial_name
    from launcher.trials.merged_logs import TrialLogs, last_lines, prefixes, since_stamp
    from launcher.trials.status import StatusReader

    if json and follow:
        raise typer.BadParameter("--json prints one document and can't be used with --follow")
    files = find_trial(trial, cluster=cluster)
    if first_error:
        _first_error(files)
        return ExitCode.OK
    stamp = since_stamp(since, datetime.now()) if since else ""
    found = TrialLogs(files, pattern=workers, grep=grep, attempt=attempt, since=stamp)
    found.check()
    if json:
        output.document(lines=list(last_lines(found.read(last=True), tail)))
        return ExitCode.OK
    several = attempt is None and len(files.all_attempts()) > 1
    shown = prefixes(found.workers(), attempts=several)
    reader = StatusReader(files)
    try:
        for line in last_lines(found.read(last=not follow), tail):
            output.data(shown(line))
        for line in found.follow(lambda: reader.brief_view().is_over) if follow else ():
            output.data(shown(line))
    except KeyboardInterrupt:
        name = trial_name(files)
        output.say(f"\n{name} is not affected.  stop it: realsys stop {name}")
        return ExitCode.INTERRUPTED
    finally:
        reader.close()
    return ExitCode.OK


def _first_error(files: TrialFiles) -> None:
    """Prints the first failure, else the first line that mentions an error."""
    from launcher.terminal import output
    from launcher.trials.merged_logs import TrialLogs, prefixes
    from launcher.trials.status import trial_view

    view = trial_view(files)
    failure = view.exit.first_failure if view.exit else None
    if failure is not None:
        output.data(f"{failure.who}: {failure.why}")
        for line in failure.log_tail:
            output.data(f"{failure.worker} | {line}")
        return
    errors = TrialLogs(files, grep=r" (ERROR|CRITICAL) |Error: |srun: error")
    shown = prefixes(errors.workers(), attempts=True)
    for found in errors.read(last=True):
        output.data(shown(found))
        return
    output.say(f"no log of {view.trial} mentions an error; it is {view.state.value}")


def explain(trial: o.Trial, json: o.Json = False, cluster: o.Cluster = None) -> None:
    """Explain why a trial waits, hangs or has failed, and what to do about it."""
    from time import time

    from launcher.terminal import output
    from launcher.trials.explain import explain as lines_of
    from launcher.trials.find_trials import find_trial
    from launcher.trials.idle_episodes import idle_episodes
    from launcher.trials.status import trial_view
    from realsys.trial.trial_state import State

    files = find_trial(trial, cluster=cluster)
    view = trial_view(files)
    idle = idle_episodes(files, view, now_s=time()) if view.state in State.live() else None
    lines = list(lines_of(view, idle))
    if json:
        output.document(lines=lines)
    else:
        output.data(*lines)


def show(
    trial: o.OptionalTrial = None,
    config: Annotated[
        str | None,
        o.option(
            "--config EXPERIMENT", "Every setting of an experiment: value, range, unit, meaning."
        ),
    ] = None,
    overrides: o.Overrides = None,
    imports: o.Imports = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> None:
    """Show the settings of a trial, or every setting of an experiment (--config)."""
    words = [word for word in (trial, *(overrides or [])) if word is not None]
    if config is not None:
        _show_experiment(config, words, imports or [], json)
        return
    if len(words) != 1:
        raise typer.BadParameter("give either a TRIAL or --config EXPERIMENT [NAME=VALUE]...")
    from launcher.plan.plan_view import chosen_lines
    from launcher.terminal import output
    from launcher.trials.changed_settings import change_lines
    from launcher.trials.find_trials import find_trial
    from realsys.api.plan import read_plan
    from realsys.trial.records import TrialRecord, read_record

    files = find_trial(trial or "", cluster=cluster)
    plan, record = read_plan(files.plan), read_record(TrialRecord, files.record)
    changes = record.changes if record else ()
    if json:
        output.document(trial=plan.trial, options=plan.options, chosen=plan.chosen, changes=changes)
        return
    for name, value in _flat(plan.options):
        if not name.endswith("scheduling"):  # nothing of it is set
            output.data(f"{name}={value}")
    output.say(*chosen_lines(plan.chosen), *change_lines(changes))


def graph(
    name: Annotated[str, o.argument("EXPERIMENT|TRIAL", "The dataflow to show.")],
    out: Annotated[Path | None, o.option("--out FILE.png", "Also draw a picture.")] = None,
    imports: o.Imports = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> None:
    """Show the model function calls of an experiment and the keys between them."""
    from launcher.terminal import output
    from realsys.observability.pictures.graph_picture import draw, graph_text

    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"--out {out}: the name must end in .png, .svg or .pdf")
    found = _graph_of(name, imports or [], cluster)
    if out is not None:
        from launcher.submit.submit import translate_os_errors

        with translate_os_errors(out, "the picture"):
            draw(found, out)
        output.say(f"drawn: {out}")
    if json:
        output.document(levels=found.levels, edges=found.edges(), calls=found.nodes)
    else:
        output.data(graph_text(found))


def report(trial: o.Trial, json: o.Json = False, cluster: o.Cluster = None) -> None:
    """Write the trial's report page (curves, samples, graph) and print its path."""
    from launcher.terminal import output
    from launcher.trials.find_trials import find_trial
    from realsys.observability.report.report import write_report

    path = write_report(find_trial(trial, cluster=cluster).root)
    if json:
        output.document(report=str(path))
    else:
        output.data(str(path))


def schema(
    experiment: Annotated[str, o.argument("EXPERIMENT", "Whose settings.")],
    imports: o.Imports = None,
) -> None:
    """Print the JSON Schema of an experiment's settings, for completion in an editor."""
    import json

    from launcher.submit.planning import default_experiment, import_all
    from launcher.terminal import output
    from realsys.config.json_schema import json_schema

    import_all(imports or [])
    found = json_schema(default_experiment(experiment))
    output.data(json.dumps(found, indent=1))


def experiments(imports: o.Imports = None, json: o.Json = False) -> None:
    """List the experiments that can be launched."""
    from launcher.submit import planning
    from launcher.terminal import output

    planning.import_all(imports or [])
    found = planning.experiments()
    if json:
        output.document(experiments=[{"name": name, "doc": doc} for name, doc in found])
    else:
        output.table(("experiment", "what it does"), found)


def _show_experiment(name: str, words: list[str], imports: list[str], json: bool) -> None:
    import shutil

    from launcher.cli.tables import print_options
    from launcher.submit import setting_table
    from launcher.submit.planning import chosen_experiment, default_experiment, import_all
    from launcher.terminal import output
    from realsys.config.option_tree import rows

    import_all(imports)
    setting_table.remember(name, default_experiment(name))
    options, chosen = chosen_experiment(name, words)
    why = {one.path: f"chosen: {one.why}; " for one in chosen}
    found = [replace(row, meaning=why.get(row.path, "") + row.meaning) for row in rows(options)]
    if json:
        output.document(
            experiment=name,
            options=[row for row in found if row.default is not None or not row.section],
        )
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    print_options(found, width=width)


def _graph_of(name: str, imports: list[str], cluster: str | None) -> DataflowGraph:
    from launcher.submit.planning import default_experiment, import_all
    from launcher.trials.find_trials import find_trial
    from realsys.api import registry
    from realsys.api.plan import read_plan

    import_all(imports)
    if name in registry.names("experiment"):
        return default_experiment(name).initial_setup().graph()
    if "/" not in name:
        registry.find("experiment", name, where="command line")  # raises with the nearest names
    return read_plan(find_trial(name, cluster=cluster).plan).phases[-1].config.graph()


def _flat(options: object, prefix: str = "") -> list[tuple[str, str]]:
    from realsys.config.option_tree import value_text

    if isinstance(options, dict) and options:
        return [pair for k, v in options.items() for pair in _flat(v, f"{prefix}{k}.")]
    return [(prefix.rstrip("."), value_text(options))]
