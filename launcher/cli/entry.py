"""The console command `realsys`: answers help, version and Tab itself, hands all else to the CLI.

For people who type: importing typer alone takes longer than they notice, so this file imports nothing that
is not needed to answer. It parses no options and has no verbs (launcher/cli/command_line.py has).
"""

from __future__ import annotations

import sys

INTERRUPTED = 130  # as launcher/terminal/exit_codes.py has it


def main(args: list[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit status."""
    try:
        return _main(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:  # while modules were imported, or on the way out
        return INTERRUPTED


def _main(words: list[str]) -> int:
    try:
        text = _quick_answer(words)
        if text is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return 0
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except UnicodeEncodeError:  # a terminal without box characters: typer draws what it can
        pass
    from launcher.cli.command_line import run

    return run(words)


def _quick_answer(words: list[str]) -> str | None:
    """What to print, where no option has to be parsed for it; else None."""
    if words in ([], ["--help"], ["-h"]):
        from launcher.cli import front_page

        return front_page.HELP if _colour() else without_colour(front_page.HELP)
    if words == ["--version"]:
        from realsys import __version__

        return f"realsys {__version__}\n"
    if words[0] == "__complete":
        from launcher.cli.completion import candidates

        # Nothing for the shell that would do something to the terminal.
        return "".join(f"{word}\n" for word in candidates(words[1:]) if word.isprintable())
    if words[0] == "completion" and len(words) == 2:
        from launcher.cli.completion import SCRIPTS

        return SCRIPTS.get(words[1])
    return None


def without_colour(text: str) -> str:
    """``text`` without its ``ESC [ … m`` sequences."""
    first, *others = text.split("\x1b[")
    return first + "".join(other.partition("m")[2] for other in others)


def _colour() -> bool:
    import os

    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def _forget_stdout() -> None:
    """Nobody reads any more (`realsys --help | head`): the interpreter must not flush at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
