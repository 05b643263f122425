"""Runs a verb and reports its errors, for the command line and for verbs that are run without typer.

A RealsysError becomes three lines (or a JSON document) and its exit status; any other exception is reported
as a bug in realsys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from realsys.api.errors import RealsysError


def run_reporting_errors(verb: Callable[[], object], *, name: str, as_json: bool) -> int:
    """Runs the verb of that name and returns its exit status. Prints every error, raises none."""
    from realsys.api.errors import RealsysError
    from realsys.trial.folders import restrict_umask

    restrict_umask()
    try:
        status = verb()
    except RealsysError as error:
        return _refuse(error, as_json=as_json)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except SystemExit as leaving:  # typer, as below
        return leaving.code if isinstance(leaving.code, int) else ExitCode.RUN_FAILED
    except BrokenPipeError:  # the reader of a pipe closed it
        discard_stdout()
        return ExitCode.RUN_FAILED
    except Exception as error:  # outermost frame
        missing = _missing_extra(error, name)
        return (
            _bug(error, as_json=as_json) if missing is None else _refuse(missing, as_json=as_json)
        )
    return status if isinstance(status, int) else ExitCode.OK


def discard_stdout() -> None:
    """Redirects stdout to /dev/null after its reader has gone (`realsys --help | head`), so that the
    flush at exit does not fail.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(error: RealsysError, *, as_json: bool) -> int:
    """Prints an error that was raised on purpose, and returns its exit status."""
    from launcher.terminal import output

    output.error(error, as_json=as_json)
    return error.exit_code


def _missing_extra(error: Exception, name: str) -> RealsysError | None:
    """The refusal for a package that only an extra brings; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    from realsys.config.extras import missing_module

    return missing_module(error.name, where=f"realsys {name}")


def _bug(error: Exception, *, as_json: bool) -> int:
    """Reports an unexpected exception, with everything that a bug report needs."""
    import traceback

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
