"""The command line: which verbs there are, and what becomes of an error.

For launcher/cli/entry.py, which hands over what it can't answer itself. A RealsysError is three lines
(or a JSON document) and its exit status; anything else that escapes is our bug and says so. The
verbs are in run_verbs.py, inspect_verbs.py, site_verbs.py and etcd_verbs.py.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from realsys.api.errors import RealsysError

app = typer.Typer(
    name="realsys",
    help="Launch RL post-training experiments and look after them.",
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
            inspect_verbs.schema,
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
    """Launch RL post-training experiments and look after them."""


def run(words: list[str]) -> int:
    """Runs one command line and returns its exit status. Prints every error, raises none."""
    from realsys.api.errors import RealsysError
    from realsys.trial.folders import restrict_umask

    restrict_umask()
    # What our libraries log is for workers' logs; here every message is printed on purpose.
    logging.getLogger("realsys").addHandler(logging.NullHandler())
    as_json = "--json" in words
    try:
        status = typer.main.get_command(app).main(
            args=words, prog_name="realsys", standalone_mode=False
        )
    except typer.TyperException as error:
        return _usage(error, words, as_json=as_json)
    except RealsysError as error:
        return _refuse(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except SystemExit as leaving:  # a reader that closed its pipe
        return leaving.code if isinstance(leaving.code, int) else ExitCode.RUN_FAILED
    except Exception as error:  # outermost frame
        missing = _missing_extra(error, words)
        return (
            _bug(error, as_json=as_json) if missing is None else _refuse(missing, as_json=as_json)
        )
    return status if isinstance(status, int) else ExitCode.OK


def _usage(error: typer.TyperException, words: list[str], *, as_json: bool) -> int:
    """A command line that can't be understood."""
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


def _refuse(error: RealsysError, *, as_json: bool) -> int:
    """Prints an error that was raised on purpose, and returns its exit status."""
    from launcher.terminal import output

    output.error(error, as_json=as_json)
    return error.exit_code


def _missing_extra(error: Exception, words: list[str]) -> RealsysError | None:
    """The refusal for a package that only an extra brings; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from realsys.api.extras import missing_module

    return missing_module(error.name, where=f"realsys {words[0]}")


def _bug(error: Exception, *, as_json: bool) -> int:
    """An exception that nobody raised on purpose, with all that a report needs."""
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
        fix="report it with the traceback above; if the place is in a file of your own, repair that",
    )
    output.error(problem, as_json=as_json)
    return ExitCode.BUG
