"""The command line: its verbs, and words that can't be parsed.

For launcher/cli/entry.py, which passes on what it can't answer itself. Its verbs are in
launcher/cli/verbs/; error_reports.py handles their errors.
"""

from __future__ import annotations

import importlib
import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from launcher.cli.error_reports import run_reporting_errors
from launcher.cli.shared_options import INSPECT, MODELS, RUN, SETUP
from launcher.terminal.exit_codes import ExitCode

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
    "audit": (INSPECT, "audit_verbs", "audit"),
    "samples": (INSPECT, "samples_verbs", "samples"),
    "data": (INSPECT, "data_verbs", "data"),
    "rescore": (INSPECT, "data_verbs", "rescore"),
    "serve": (MODELS, "model_verbs", "serve"),
    "chat": (MODELS, "model_verbs", "chat"),
    "eval": (MODELS, "model_verbs", "eval_"),
    "experiments": (SETUP, "inspect_verbs", "experiments"),
    "schema": (SETUP, "inspect_verbs", "schema"),
    "clusters": (SETUP, "site_verbs", "clusters"),
    "doctor": (SETUP, "site_verbs", "doctor"),
    "image": (SETUP, "site_verbs", "image"),
    "etcd": (SETUP, "site_verbs", "etcd"),
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
    # Log records of realsys are for workers' logs; the command line prints its messages explicitly.
    logging.getLogger("realsys").addHandler(logging.NullHandler())
    return run_reporting_errors(
        lambda: _parse_and_run(words), name=words[0] if words else "", as_json="--json" in words
    )


def _parse_and_run(words: list[str]) -> object:
    try:
        return typer.main.get_command(app).main(
            args=words, prog_name="realsys", standalone_mode=False
        )
    except typer.TyperException as error:
        return _usage(error, words, as_json="--json" in words)
    except typer.Abort:
        return ExitCode.INTERRUPTED


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
