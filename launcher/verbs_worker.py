"""The verbs about one worker of a running trial: exec, tell."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from launcher import cli_options as o
from launcher.exit_codes import ExitCode

Worker = Annotated[str, typer.Argument(metavar="WORKER", help="E.g. model_worker/0.")]


def exec_(
    trial: o.Trial,
    worker: Worker,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="After --; else a shell.", show_default=False),
    ] = None,
    cluster: o.Cluster = None,
) -> int:
    """Open a shell, or run a command, beside a running worker, on its node and in its image."""
    from launcher.status import TrialReader
    from launcher.trials import find_trial
    from launcher.worker_shell import run_in_place, shell_command

    reader = TrialReader(find_trial(trial, cluster=cluster))
    argv, environment = shell_command(reader, worker, command or [], terminal=sys.stdin.isatty())
    reader.close()
    run_in_place(argv, environment)
    return ExitCode.OK


def tell(
    trial: o.Trial,
    worker: Worker,
    command: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND",
            help="pause, resume, start, interrupt, exit, configure or dump.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE", help="Of configure: log_level=debug.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For the worker's answer.")
    ] = 60.0,
    cluster: o.Cluster = None,
) -> int:
    """Send a command to a running worker: pause it, let it go on, have it write its stacks."""
    from contextlib import closing

    from launcher import output
    from launcher.status import TrialReader
    from launcher.tell_worker import tell_worker
    from launcher.trials import find_trial

    files = find_trial(trial, cluster=cluster)
    with closing(TrialReader(files)) as reader:
        state = tell_worker(reader, worker, command, arguments or (), timeout_s=timeout)
    output.say(f"{worker} is {state}")
    if command == "dump":
        kind, _, index = worker.partition("/")
        output.data(str(files.all_attempts()[-1].stacks / f"{kind}-{index}.txt"))
    return ExitCode.OK
