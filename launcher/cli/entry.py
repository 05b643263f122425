"""The console command `realsys`: answers help, version and Tab itself, passes everything else on.

Importing typer alone takes noticeably long, so this module imports nothing that the answer does not need.
It parses no options and has no verbs (launcher/cli/verbs/quick_verbs.py and command_line.py do).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

# Run without typer, where their words need no interpretation.
QUICK_VERBS = ("status", "ls", "plan")
INTERRUPTED = 130  # equals ExitCode.INTERRUPTED in launcher/terminal/exit_codes.py


def main(args: list[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit status."""
    if args is None:  # of its own process, whose objects mostly stay until it ends
        gc.set_threshold(100_000)
        atexit.register(gc.freeze)
        if "" in os.environ.get("PYTHONPATH", "-").split(os.pathsep):  # to Python, this folder
            from launcher.cli.current_folder import leave_current_folder

            leave_current_folder(os.environ, sys.path)
    try:
        return _main(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:  # during imports or exit
        return INTERRUPTED


def _main(words: list[str]) -> int:
    try:
        text = _answer_without_cli(words)
        if text is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return 0
    except BrokenPipeError:
        from launcher.cli.error_reports import discard_stdout

        discard_stdout()
        return 0
    except UnicodeEncodeError:  # a terminal without box characters: typer handles it
        pass
    if words[0] in QUICK_VERBS:
        from launcher.cli.error_reports import run_reporting_errors
        from launcher.cli.verbs.quick_verbs import quick_verb

        if verb := quick_verb(words):
            return run_reporting_errors(verb, name=words[0], as_json="--json" in words)
    from launcher.cli.command_line import run

    return run(words)


def _answer_without_cli(words: list[str]) -> str | None:
    """Returns the output if no option has to be parsed for it; else None."""
    if words in ([], ["--help"], ["-h"]):
        from launcher.cli import front_page

        return front_page.HELP if _colour() else without_colour(front_page.HELP)
    if words == ["--version"]:
        from realsys import __version__

        return f"realsys {__version__}\n"
    if words[0] == "__complete":
        from launcher.cli.completion import candidates

        # Only words without control characters reach the terminal.
        return "".join(f"{word}\n" for word in candidates(words[1:]) if word.isprintable())
    if words[0] == "completion" and len(words) == 2:
        from launcher.cli.completion import SCRIPTS

        return SCRIPTS.get(words[1])
    return None


def without_colour(text: str) -> str:
    """Removes the ``ESC [ … m`` sequences from ``text``."""
    first, *others = text.split("\x1b[")
    return first + "".join(other.partition("m")[2] for other in others)


def _colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


if __name__ == "__main__":
    sys.exit(main())
