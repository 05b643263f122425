"""The command line: its verbs, and the handling of errors.

For launcher/cli/entry.py, which passes on what it can't answer itself. A RealsysError becomes three lines
(or a JSON document) and its exit status; any other exception is reported as a bug in realsys. The verbs
are in launcher/cli/verbs/.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from launcher.cli.shared_options import INSPECT, RUN, SETUP
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from realsys.api.errors import RealsysError

# Verb -> its panel of the help page, its module in launcher/cli/verbs, its function.
VERBS: dict[str, tuple[str, str, str]] = {
    "launch": (RUN, "run_verbs", "launch"),
    "plan": (RUN, "run_verbs", "plan"),
    "resume": (RUN, "run_verbs", "resume"),
    "replay": (RUN, "run_verbs", "replay"),
    "stop": (RUN, "run_verbs", "stop"),
    "wait": (RUN, "run_verbs", "wait"),
    "rm": (RUN, "remove_verbs", "rm"),
    "status": (INSPECT, "inspect_verbs", "status"),
    "watch": (INSPECT, "inspect_verbs", "watch"),
    "explain": (INSPECT, "inspect_verbs", "explain"),
    "logs": (INSPECT, "inspect_verbs", "logs"),
    "exec": (INSPECT, "worker_verbs", "exec_"),
    "tell": (INSPECT, "worker_verbs", "tell"),
    "scale": (INSPECT, "worker_verbs", "scale"),
    "ls": (INSPECT, "inspect_verbs", "ls"),
    "show": (INSPECT, "inspect_verbs", "show"),
    "graph": (INSPECT, "inspect_verbs", "graph"),
    "report": (INSPECT, "inspect_verbs", "report"),
    "experiments": (SETUP, "inspect_verbs", "experiments"),
    "schema": (SETUP, "inspect_verbs", "schema"),
    "clusters": (SETUP, "site_verbs", "clusters"),
    "doctor": (SETUP, "site_verbs", "doctor"),
    "image": (SETUP, "site_verbs", "image"),
    "etcd": (SETUP, "etcd_verbs", "etcd"),
    "completion": (SETUP, "site_verbs", "completion"),
}


class LazyVerbs(TyperGroup):
    """Imports and builds the command of a verb on demand. (Typer's own click is untyped here.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all verbs, in the order of the help page."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a verb; None for an unknown word, whose refusal looks in ``commands`` for the
        nearest."""
        for name in (cmd_name,) if cmd_name in VERBS else VERBS:
            if name not in self.commands:
                self.commands[name] = verb_command(name)
        return self.commands.get(cmd_name)


def verb_command(name: str) -> Any:
    """Builds the command of one verb."""
    panel, module, function = VERBS[name]
    verb = getattr(importlib.import_module(f"launcher.cli.verbs.{module}"), function)
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    alone.command(name, rich_help_panel=panel)(verb)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="realsys",
    cls=LazyVerbs,
    help="Launch and manage RL post-training experiments.",
    epilog="Exit status and settings: docs/cli.md",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Launch and manage RL post-training experiments."""


def run(words: list[str]) -> int:
    """Runs one command line and returns its exit status. Prints every error, raises none."""
    from realsys.api.errors import RealsysError
    from realsys.trial.folders import restrict_umask

    restrict_umask()
    # Log records of realsys are for workers' logs; the command line prints its messages explicitly.
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
    except SystemExit as leaving:  # the reader of a pipe closed it
        return leaving.code if isinstance(leaving.code, int) else ExitCode.RUN_FAILED
    except Exception as error:  # outermost frame
        missing = _missing_extra(error, words)
        return (
            _bug(error, as_json=as_json) if missing is None else _refuse(missing, as_json=as_json)
        )
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


def _refuse(error: RealsysError, *, as_json: bool) -> int:
    """Prints an error that was raised on purpose, and returns its exit status."""
    from launcher.terminal import output

    output.error(error, as_json=as_json)
    return error.exit_code


def _missing_extra(error: Exception, words: list[str]) -> RealsysError | None:
    """The refusal for a package that only an extra brings; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from realsys.config.extras import missing_module

    return missing_module(error.name, where=f"realsys {words[0]}")


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
