"""The end of a log, for whoever shows it."""

from __future__ import annotations

from pathlib import Path

from realsys.api.basics.bounded_files import open_regular


def last_lines(path: Path, *, max_bytes: int = 65_536) -> list[str]:
    """Returns the lines at the end of a file, the first perhaps cut; none if it can't be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - max_bytes))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def last_log_line(path: Path, *, most_chars: int = 300) -> str:
    """Returns the last line of a program's log that is not blank, for an error that quotes it."""
    spoken = [line for line in last_lines(path) if line.strip()]
    return spoken[-1].strip()[:most_chars] if spoken else "(it printed nothing)"
