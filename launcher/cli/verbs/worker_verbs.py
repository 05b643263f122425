"""The verbs for workers of a running trial: exec, tell, scale."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from launcher.cli import shared_options as o

Worker = Annotated[str, typer.Argument(metavar="WORKER", help="E.g. model_worker/0.")]


def exec_(
    trial: o.Trial,
    worker: Worker,
    command: Annotated[
        list[str] | None, o.argument("COMMAND", "After --; default: a shell.")
    ] = None,
    cluster: o.Cluster = None,
) -> None:
    """Open a shell, or run a command, beside a running worker, on its node and in its image."""
    from launcher.control.worker_shell import run_in_place, shell_command
    from launcher.trials.find_trials import find_own_trial
    from launcher.trials.status import StatusReader

    reader = StatusReader(find_own_trial(trial, cluster=cluster))
    argv, environment = shell_command(reader, worker, command or [], terminal=sys.stdin.isatty())
    reader.close()
    run_in_place(argv, environment)


def tell(
    trial: o.Trial,
    worker: Worker,
    command: Annotated[
        str, o.argument("COMMAND", "pause, resume, start, interrupt, exit, configure or dump.")
    ],
    arguments: Annotated[
        list[str] | None, o.argument("NAME=VALUE", "Of configure: log_level=debug.")
    ] = None,
    timeout: Annotated[
        float, o.option("--timeout SECONDS", "Time-out for the worker's reply.")
    ] = 60.0,
    cluster: o.Cluster = None,
) -> None:
    """Send a command to a running worker: pause it, resume it, dump its stacks."""
    from contextlib import closing

    from launcher.control.send_command import send_command
    from launcher.terminal import output
    from launcher.trials.find_trials import find_own_trial
    from launcher.trials.status import StatusReader

    files = find_own_trial(trial, cluster=cluster)
    with closing(StatusReader(files)) as reader:
        state = send_command(reader, worker, command, arguments or (), timeout_s=timeout)
    output.say(f"{worker} is {state}")
    if command == "dump":
        kind, _, index = worker.partition("/")
        output.data(str(files.all_attempts()[-1].stacks / f"{kind}-{index}.txt"))


def _number(kind: str) -> Any:
    return typer.Option(f"--{kind}", metavar="N", min=1, help=f"Number of {kind} that shall run.")


def scale(
    trial: o.Trial,
    makers: Annotated[int | None, _number("makers")] = None,
    servers: Annotated[int | None, _number("servers")] = None,
    workers: Annotated[int | None, _number("workers")] = None,
    drain: Annotated[
        list[str] | None, o.option("--drain NAME", "Remove this one; repeatable.")
    ] = None,
    like: Annotated[
        str | None, o.option("--like NAME", "Added ones copy this one; default: the last.")
    ] = None,
    grace: Annotated[
        float, o.option("--grace SECONDS", "Time for removed ones to finish.", min=0)
    ] = 60.0,
    timeout: Annotated[
        float, o.option("--timeout SECONDS", "Time-out for added ones to start.")
    ] = 180.0,
    cluster: o.Cluster = None,
) -> None:
    """Add makers, servers or rollout workers to a running asynchronous trial, or remove some."""
    from contextlib import closing

    from launcher.control.scale import scale as scale_trial
    from launcher.control.scale_plan import ScaleRequest
    from launcher.terminal import output
    from launcher.trials.find_trials import find_own_trial
    from launcher.trials.status import StatusReader

    request = ScaleRequest(
        makers=makers,
        servers=servers,
        workers=workers,
        drain=tuple(drain or ()),
        like=like,
        grace_s=grace,
    )
    with closing(StatusReader(find_own_trial(trial, cluster=cluster))) as reader:
        for row in scale_trial(reader, request, timeout_s=timeout, say=output.say):
            output.data("  ".join(row))
