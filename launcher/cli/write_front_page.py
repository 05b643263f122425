"""Writes launcher/cli/front_page.py: what the quick front answers with, taken from the real command line.

    python -m launcher.cli.write_front_page

Run it after a verb, an option or a built-in experiment was added or changed; a test compares.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WIDTH = 80  # fits every terminal; wider ones lose nothing
TARGET = Path(__file__).with_name("front_page.py")
HEADER = '''"""The help page and the words that Tab knows, by `python -m launcher.cli.write_front_page`.

For launcher/cli/entry.py and completion.py, which must not import typer. Never edit by hand.
"""

# fmt: off
# ruff: noqa: E501

'''


def rendered_help() -> str:
    """The top-level help as typer draws it at WIDTH, in colour.

    In a process of its own: typer fixes width and colour when it is imported.
    """
    code = "import sys; from launcher.cli.command_line import run; sys.exit(run(['--help']))"
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
    environment |= {
        "TERMINAL_WIDTH": str(WIDTH),
        "COLUMNS": str(WIDTH),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
    )
    return "\n".join(line.rstrip() for line in done.stdout.decode().splitlines()) + "\n"


def text() -> str:
    """The generated file."""
    from launcher.cli.command_line import VERBS, verb_command
    from realsys.api import registry

    verbs = {
        name: tuple(
            sorted({opt for p in verb_command(name).params for opt in p.opts if opt[:2] == "--"})
        )
        for name in VERBS
    }
    lines = [f"HELP = {rendered_help()!r}", "VERBS: dict[str, tuple[str, ...]] = {"]
    lines += [f"    {name!r}: {options!r}," for name, options in verbs.items()]
    lines += [
        "}",
        f"EXPERIMENTS: tuple[str, ...] = {tuple(sorted(registry.BUILTIN['experiment']))!r}",
    ]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
