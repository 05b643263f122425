"""Arguments and options shared by several verbs, with their help texts.

Imports typer and nothing of realsys, because it is loaded for every command.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from launcher.submit.job_options import JobOptions

    Job = JobOptions
else:
    Job = object  # its module is imported when a verb runs

RUN, INSPECT, MODELS, SETUP = "Run", "Inspect", "Saved models", "Setup"


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


def _job(usage: str, text: str) -> Any:
    return Annotated[str | None, option(usage, text, rich_help_panel=_JOB)]


# Field of JobOptions: its option.
_JOB_OPTIONS = {
    "partition": _job("--partition -p NAME", "Partition of all tasks."),
    "account": _job("--account -A NAME", "Account."),
    "qos": _job("--qos -q NAME", "Quality of service."),
    "reservation": _job("--reservation NAME", "Reservation to run in."),
    "constraint": _job("--constraint -C LIST", "Features that nodes must have."),
    "nodelist": _job("--nodelist -w HOSTS", "Only these nodes, e.g. n[1-4]."),
    "exclude": _job("--exclude -x HOSTS", "Not these nodes."),
    "time": _job("--time -t TIME", "Time limit, e.g. 12:00:00 or 2-0."),
    "begin": _job("--begin WHEN", "Start no earlier, e.g. 18:00 or now+2hours."),
    "deadline": _job("--deadline WHEN", "Remove it if it can't end before this."),
    "layout": _job("--layout KIND", "auto, single, het or split."),
    "requeue": Annotated[
        bool | None,
        option(
            "--requeue/--no-requeue",
            "Requeue the job after preemption, a lost node or the time limit.",
            rich_help_panel=_JOB,
        ),
    ],
    "after": _job("--after TRIAL[:ok|any|notok]", "Wait until that trial has ended."),
    "preflight": _job("--preflight off|warn|stop", "Check nodes and GPUs before workers start."),
}


def with_job_options(verb: Callable[..., int | None]) -> Callable[..., int | None]:
    """Adds the job options to a verb; its parameter ``job`` receives them as a JobOptions."""

    @functools.wraps(verb)
    def command(**given: Any) -> int | None:
        from launcher.submit.job_options import JobOptions

        job = JobOptions(**{name: given.pop(name) for name in _JOB_OPTIONS})
        return verb(**given, job=job)

    signature = inspect.signature(verb)
    hints = get_type_hints(verb, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(annotation=hints[name], kind=kind)
        for name, parameter in signature.parameters.items()
        if name != "job"
    ]
    parameters += [
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in _JOB_OPTIONS.items()
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


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
Model = Annotated[
    str,
    argument("TRIAL|MODEL", "A trial (its newest checkpoint), or a Hugging Face directory."),
]
Step = Annotated[
    int | None, option("--step N", "The trial's checkpoint of this step; default: the newest.")
]
Role = Annotated[str | None, option("--role NAME", "Whose checkpoint; default: the actor's.")]
Dtype = Annotated[
    str | None, option("--dtype NAME", "Of the weights; default: bfloat16 on a GPU, else float32.")
]
Device = Annotated[str | None, option("--device NAME", "cuda or cpu; default: a GPU if there is.")]
OptionalTrial = Annotated[str | None, _TRIAL]
