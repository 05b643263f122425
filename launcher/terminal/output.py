"""Output functions of every verb: data on stdout, messages on stderr.

Tables are drawn by rich on a terminal and are plain aligned text, never truncated, in a pipe. The rules
for colour (NO_COLOR, TERM=dumb, FORCE_COLOR, not a terminal) are here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from launcher.terminal.text import visible
from realsys.api.errors import ConfigErrors, RealsysError
from realsys.api.plain import to_plain

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_UNQUOTED = re.compile("[\x7f-\x9f\ud800-\udfff]")  # json does not escape them


def data(*lines: str) -> None:
    """Writes lines of the result to stdout."""
    for line in lines:
        _write(sys.stdout, visible(line))


def say(*lines: str) -> None:
    """Writes messages to stderr, not part of the result."""
    for line in lines:
        _write(sys.stderr, visible(line))


def document(**fields: Any) -> None:
    """Writes the one JSON document of a ``--json`` verb."""
    content = {"schema": SCHEMA, **{name: to_plain(value) for name, value in fields.items()}}
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=True)
    _write(sys.stdout, _UNQUOTED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def error(problem: RealsysError, *, as_json: bool) -> None:
    """Writes what, where and fix of an error; as a JSON document on stdout if requested."""
    if as_json:
        document(error=error_fields(problem))
        return
    if isinstance(problem, ConfigErrors):
        _headed("error:", "1;31", problem.what)
        say(str(problem))
        return
    _headed("error:", "1;31", str(problem))


def error_fields(problem: RealsysError) -> dict[str, Any]:
    """Converts an error to plain values; several problems are also listed one by one."""
    fields: dict[str, Any] = {
        "kind": type(problem).__name__,
        "what": problem.what,
        "where": problem.where,
        "fix": problem.fix,
    }
    if isinstance(problem, ConfigErrors):
        fields["problems"] = [error_fields(p) for p in problem.problems]
    return fields


def warn(*texts: str) -> None:
    """Writes warnings to stderr."""
    for text in texts:
        _headed("warning:", "33", text)


def _headed(head: str, code: str, text: str) -> None:
    _write(sys.stderr, f"{paint(head, code)} {visible(text)}")


def colour(stream: TextIO) -> bool:
    """Whether escape codes may be written to ``stream``."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def can_draw(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose lines can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def paint(text: str, code: str) -> str:
    """Returns ``text`` in an SGR colour for stderr, if colours are enabled."""
    return f"\x1b[{code}m{text}\x1b[0m" if colour(sys.stderr) else text


def console(stream: TextIO | None = None) -> Console:
    """Returns a rich console that follows the rules for colour."""
    from rich.console import Console

    stream = stream or sys.stdout
    on = colour(stream)
    return Console(
        file=stream, force_terminal=on or None, no_color=not on, highlight=False, emoji=False
    )


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str] = ()
) -> None:
    """Prints rows under headers: with rich on a terminal, as plain aligned text otherwise."""
    if not sys.stdout.isatty():
        data(*aligned([columns, *rows]))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, name in enumerate(columns):
        drawn.add_column(name, style=styles[i] if i < len(styles) else "", overflow="fold")
    for row in rows:
        drawn.add_row(*[Text(visible(cell)) for cell in row])
    console().print(drawn)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the columns of the rows; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()
