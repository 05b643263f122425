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
