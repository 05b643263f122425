"""Arguments and options that several verbs share, with their help, written once.

Imports typer and nothing of ours: it is loaded for every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

RUN, INSPECT, SETUP = "Run", "Inspect", "Setup"

Experiment = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT",
        help="Name of an experiment (realsys experiments).",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE",
        help="Settings, e.g. actor.optimizer.lr=1e-5 (realsys show --config EXPERIMENT).",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML file of settings, nested or dotted; NAME=VALUE wins."
    ),
]
TrialName = Annotated[
    str | None, typer.Option("--trial", metavar="NAME", help="The trial's name; else run<N>.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Cluster spec; else $REALSYS_CLUSTER, else local.",
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE|MODULE",
        help="Import it first, here and in every worker (your own experiments); repeatable.",
    ),
]
_JOB = "Slurm job (as sbatch's own options)"


def _of_job(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_JOB)


Partition = Annotated[
    str | None, _of_job("--partition", "-p", metavar="NAME", help="Partition of all tasks.")
]
Account = Annotated[str | None, _of_job("--account", "-A", metavar="NAME", help="Account.")]
Qos = Annotated[str | None, _of_job("--qos", "-q", metavar="NAME", help="Quality of service.")]
Reservation = Annotated[
    str | None, _of_job("--reservation", metavar="NAME", help="Reservation to run in.")
]
Constraint = Annotated[
    str | None, _of_job("--constraint", "-C", metavar="LIST", help="Features that nodes must have.")
]
Nodelist = Annotated[
    str | None, _of_job("--nodelist", "-w", metavar="HOSTS", help="Only these nodes, e.g. n[1-4].")
]
Exclude = Annotated[
    str | None, _of_job("--exclude", "-x", metavar="HOSTS", help="Not these nodes.")
]
Time = Annotated[
    str | None, _of_job("--time", "-t", metavar="TIME", help="Time limit, e.g. 12:00:00 or 2-0.")
]
Begin = Annotated[
    str | None,
    _of_job("--begin", metavar="WHEN", help="Start no earlier, e.g. 18:00 or now+2hours."),
]
Deadline = Annotated[
    str | None, _of_job("--deadline", metavar="WHEN", help="Remove it if it can't end before this.")
]
Layout = Annotated[
    str | None, _of_job("--layout", metavar="KIND", help="auto, single, het or split.")
]
Requeue = Annotated[
    bool | None,
    typer.Option(
        "--requeue/--no-requeue",
        help="Go on by itself after preemption, a lost node and the time limit.",
        rich_help_panel=_JOB,
    ),
]
After = Annotated[
    str | None,
    _of_job("--after", metavar="TRIAL[:ok|any|notok]", help="Wait until that trial is over."),
]
NoSnapshot = Annotated[
    bool,
    typer.Option(
        "--no-snapshot",
        help="Run the checkout as it will be then, not a copy of it.",
        rich_help_panel=_JOB,
    ),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Start it and return; no live view.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Trial = Annotated[
    str,
    typer.Argument(
        metavar="TRIAL",
        help="experiment/trial, an experiment (its newest trial), or a trial's folder.",
        show_default=False,
    ),
]
Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep", help="A trial for each combination of the settings with several values (x=1,2)."
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        metavar="N",
        min=1,
        help="Of a sweep on Slurm, run at most N trials at a time.",
    ),
]
TrialOrSweep = Annotated[
    str | None,
    typer.Argument(
        metavar="TRIAL",
        help="experiment/trial, an experiment (its newest trial), a trial's folder, or "
        "experiment/sweep.",
        show_default=False,
    ),
]
OptionalTrial = Annotated[
    str | None,
    typer.Argument(
        metavar="TRIAL",
        help="experiment/trial, an experiment (its newest trial), or a trial's folder.",
        show_default=False,
    ),
]
