"""Arguments and options that several verbs share, with their help, written once.

Imports typer and nothing of ours: it is loaded for every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
OptionalTrial = Annotated[
    str | None,
    typer.Argument(
        metavar="TRIAL",
        help="experiment/trial, an experiment (its newest trial), or a trial's folder.",
        show_default=False,
    ),
]
