"""Arguments and options shared by several verbs, with their help texts.

Imports typer and nothing of realsys, because it is loaded for every command.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from launcher.submit.job_options import JobOptions

    Job = JobOptions
else:
    Job = object  # its module is imported when a verb runs

RUN, INSPECT, SETUP = "Run", "Inspect", "Setup"


def option(usage: str, text: str, **more: Any) -> Any:
    """Declares an option. ``usage`` is its names and its value as in the help: ``--tail -n N``."""
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(words[len(names) :]) or None, help=text, **more)


def argument(metavar: str, text: str) -> Any:
    """Declares an argument whose default the help does not show."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


Experiment = Annotated[str, argument("EXPERIMENT", "Name of an experiment (realsys experiments).")]
Overrides = Annotated[
    list[str] | None,
    argument(
        "NAME=VALUE", "Settings, e.g. actor.optimizer.lr=1e-5 (realsys show --config EXPERIMENT)."
    ),
]
Config = Annotated[
    Path | None,
    option("--config FILE", "YAML file of settings, nested or dotted; NAME=VALUE wins."),
]
TrialName = Annotated[str | None, option("--trial NAME", "The trial's name; else run<N>.")]
Cluster = Annotated[
    str | None, option("--cluster NAME|FILE", "Cluster spec; else $REALSYS_CLUSTER, else local.")
]
Imports = Annotated[
    list[str] | None,
    option(
        "--import FILE|MODULE",
        "Import it first, here and in every worker (for your own experiments); repeatable.",
    ),
]
_JOB = "Slurm job (as sbatch's own options)"
# Field of JobOptions: (names, value, help).
_JOB_OPTIONS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "partition": (("--partition", "-p"), "NAME", "Partition of all tasks."),
    "account": (("--account", "-A"), "NAME", "Account."),
    "qos": (("--qos", "-q"), "NAME", "Quality of service."),
    "reservation": (("--reservation",), "NAME", "Reservation to run in."),
    "constraint": (("--constraint", "-C"), "LIST", "Features that nodes must have."),
    "nodelist": (("--nodelist", "-w"), "HOSTS", "Only these nodes, e.g. n[1-4]."),
    "exclude": (("--exclude", "-x"), "HOSTS", "Not these nodes."),
    "time": (("--time", "-t"), "TIME", "Time limit, e.g. 12:00:00 or 2-0."),
    "begin": (("--begin",), "WHEN", "Start no earlier, e.g. 18:00 or now+2hours."),
    "deadline": (("--deadline",), "WHEN", "Remove it if it can't end before this."),
    "layout": (("--layout",), "KIND", "auto, single, het or split."),
    "after": (("--after",), "TRIAL[:ok|any|notok]", "Wait until that trial has ended."),
    "preflight": (("--preflight",), "off|warn|stop", "Check nodes and GPUs before workers start."),
}


def with_job_options(verb: Callable[..., int | None]) -> Callable[..., int | None]:
    """Adds the job options to a verb; its parameter ``job`` receives them as a JobOptions."""

    @functools.wraps(verb)
    def command(**given: Any) -> int | None:
        from launcher.submit.job_options import JobOptions

        job = JobOptions(**{name: given.pop(name) for name in (*_JOB_OPTIONS, "requeue")})
        return verb(**given, job=job)

    signature = inspect.signature(verb)
    hints = get_type_hints(verb, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "job"
    ]
    command.__signature__ = signature.replace(parameters=[*own, *_job_parameters()])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *_job_parameters()]}
    return command


def _job_parameters() -> Iterator[inspect.Parameter]:
    for name, (flags, metavar, text) in _JOB_OPTIONS.items():
        option = typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=_JOB)
        yield _optional(name, Annotated[str | None, option])
        if name == "layout":
            yield _optional("requeue", Requeue)


def _optional(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


Requeue = Annotated[
    bool | None,
    option(
        "--requeue/--no-requeue",
        "Requeue the job after preemption, a lost node or the time limit.",
        rich_help_panel=_JOB,
    ),
]
NoSnapshot = Annotated[
    bool,
    option(
        "--no-snapshot", "Run the checkout itself, not a copy made at launch.", rich_help_panel=_JOB
    ),
]
Detach = Annotated[bool, option("--detach -d", "Start it and return; no live view.")]
Json = Annotated[bool, option("--json", "One JSON document on stdout.")]
_TRIAL = argument(
    "TRIAL", "experiment/trial, an experiment (its newest trial), or a trial's folder."
)
Trial = Annotated[str, _TRIAL]
Sweep = Annotated[
    bool,
    option(
        "--sweep", "Start a trial for each combination of settings with several values (x=1,2)."
    ),
]
Parallel = Annotated[
    int | None, option("--parallel N", "Run at most N trials of a sweep on Slurm at a time.", min=1)
]
TrialOrSweep = Annotated[
    str | None,
    argument(
        "TRIAL",
        "experiment/trial, an experiment (its newest trial), a trial's folder, or experiment/sweep.",
    ),
]
OptionalTrial = Annotated[str | None, _TRIAL]
