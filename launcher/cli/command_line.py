"""The command line: its verbs, and the handling of errors.

For launcher/cli/entry.py, which passes on what it can't answer itself. A RealsysError becomes three lines
(or a JSON document) and its exit status; any other exception is reported as a bug in realsys. The verbs
are in launcher/cli/verbs/.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from launcher.cli.shared_options import INSPECT, RUN, SETUP
from launcher.cli.verbs import (
    etcd_verbs,
    inspect_verbs,
    remove_verbs,
    run_verbs,
    site_verbs,
    worker_verbs,
)
from launcher.terminal.exit_codes import ExitCode

app = typer.Typer(
    name="realsys",
    help="Launch and manage RL post-training experiments.",
    epilog="Exit status and settings: docs/cli.md",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
PANELS: tuple[tuple[str, tuple[Callable[..., int], ...]], ...] = (
    (
        RUN,
        (
            run_verbs.launch,
            run_verbs.plan,
            run_verbs.resume,
            run_verbs.replay,
            run_verbs.stop,
            run_verbs.wait,
            remove_verbs.rm,
        ),
    ),
    (
        INSPECT,
        (
            inspect_verbs.status,
            inspect_verbs.watch,
            inspect_verbs.explain,
            inspect_verbs.logs,
            worker_verbs.exec_,
            worker_verbs.tell,
            worker_verbs.scale,
            inspect_verbs.ls,
            inspect_verbs.show,
            inspect_verbs.graph,
            inspect_verbs.report,
        ),
    ),
    (
        SETUP,
        (
            inspect_verbs.experiments,
            site_verbs.clusters,
            site_verbs.doctor,
            site_verbs.image,
            etcd_verbs.etcd,
        ),
    ),
)
for _panel, _verbs in PANELS:
    for _verb in _verbs:
        app.command(_verb.__name__.rstrip("_"), rich_help_panel=_panel)(_verb)


@app.command(rich_help_panel=SETUP)
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> int:
    """Print a script that makes Tab complete verbs, experiments, trials and workers."""
    from launcher.cli.completion import SCRIPTS

    if shell not in SCRIPTS:
        raise typer.BadParameter(f"no completion for {shell!r}; use one of {', '.join(SCRIPTS)}")
    sys.stdout.write(SCRIPTS[shell])
    return ExitCode.OK


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Launch and manage RL post-training experiments."""


def run(words: list[str]) -> int:
    """Runs one command line and returns its exit status. Prints every error, raises none."""
    from launcher.terminal import output
    from realsys.api.errors import RealsysError
    from realsys.trial.folders import let_nobody_else_write

    let_nobody_else_write()
    # realsys' log records are for workers' logs; the command line prints its messages explicitly.
    logging.getLogger("realsys").addHandler(logging.NullHandler())
    as_json = "--json" in words
    try:
        status = typer.main.get_command(app).main(
            args=words, prog_name="realsys", standalone_mode=False
        )
    except typer.TyperException as error:
        return _usage(error, words, as_json=as_json)
    except RealsysError as error:
        output.error(error, as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except SystemExit as leaving:  # the reader of a pipe closed it
        return leaving.code if isinstance(leaving.code, int) else ExitCode.RUN_FAILED
    except Exception as error:  # outermost frame
        return _bug(error, as_json=as_json)
    return status if isinstance(status, int) else ExitCode.OK


def _usage(error: typer.TyperException, words: list[str], *, as_json: bool) -> int:
    """Reports a command line that can't be parsed."""
    from launcher.terminal import output
    from realsys.api.errors import RealsysError

    context = getattr(error, "ctx", None)
    path = context.command_path if context else "realsys"
    option = getattr(error, "option_name", "")
    what, fix = error.format_message(), f"see {path} --help"
    if option and words[0] in ("launch", "plan", "resume"):
        from launcher.submit.planning import setting_names
        from realsys.config.option_tree import meant_as_setting

        if meant := meant_as_setting(option, lambda: setting_names(words[1:])):
            what, fix = f"there is no option {option}", f"{meant}; or {fix}"
    problem = RealsysError(what, where=f"command line of {path}", fix=fix)
    output.error(problem, as_json=as_json)
    return ExitCode.USAGE


def _bug(error: Exception, *, as_json: bool) -> int:
    """Reports an unexpected exception, with everything that a bug report needs."""
    from launcher.terminal import output
    from realsys.api.errors import InternalError

    output.say("".join(traceback.format_exception(error, limit=-25)))
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (sys.prefix, sys.base_prefix, "<")
    ours = [f for f in frames if not f.filename.startswith(libraries)]
    last = (ours or list(frames))[-1]
    problem = InternalError(
        f"bug in realsys: {type(error).__name__}: {error}",
        where=f"{last.filename}:{last.lineno} in {last.name}",
        fix="report it with the traceback above; if the location is in a file of yours, fix that file",
    )
    output.error(problem, as_json=as_json)
    return ExitCode.BUG
