"""Remembers the names of an experiment's settings, and the values of those that have few, for Tab.

Completion must not build an experiment, so `plan`, `launch` and `show --config` write this table, and
reading it imports next to nothing. It counts while the files that declare the settings are as they were,
by path, size and time. Without one, Tab offers no settings.
"""

from __future__ import annotations

import os
import sys
import zlib

from launcher.sites import places

FORMAT = "realsys settings 1"
_MAX_CHARS = 1 << 20


def recall(experiment: str) -> dict[str, tuple[str, ...]]:
    """Returns the settings of an experiment, by name with their values; empty if they are not known."""
    try:
        head, _, body = _read(_path(experiment)).partition("\n\n")
        title, *sources = head.split("\n")
        if title != FORMAT or any(_stamp(line.split("\t")[0]) != line for line in sources):
            return {}
    except (OSError, ValueError):
        return {}
    rows = (line.split("\t") for line in body.splitlines())
    return {name: tuple(values) for name, *values in rows}


def remember(experiment: str, options: object) -> None:
    """Writes the table of an experiment if it changed. A cache: a failure is ignored."""
    from pathlib import Path

    from realsys.api import registry
    from realsys.api.basics import plugin_table
    from realsys.config.option_tree import declared, values
    from realsys.trial.temporary_names import replace_text

    if recall(experiment) and not any(plugin_table.registered.values()):
        return  # the files of all kinds, which need not be imported, are as they were
    rows, owners = {}, set()
    for name, owner, field, kind in declared(options):
        owners.add(owner)
        if (known := values(field, kind)) is not None:
            rows[name] = "\t".join((name, *known))
    modules = {sys.modules.get(c.__module__) for owner in owners for c in owner.__mro__}
    sources = {getattr(module, "__file__", None) for module in (registry, *modules)} - {None}
    path = _path(experiment)
    try:
        stamps = [_stamp(str(source)) for source in sorted(map(str, sources))]
        text = "\n".join((FORMAT, *stamps, "", *rows.values(), ""))
        if os.path.exists(path) and _read(path) == text:
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_text(Path(path), text)
    except (OSError, ValueError):
        pass


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_CHARS)


def _stamp(source: str) -> str:
    found = os.stat(source)
    return f"{source}\t{found.st_size}\t{found.st_mtime_ns}"


def _path(experiment: str) -> str:
    """The table's file: one for each experiment of a copy of the code."""
    which = zlib.crc32(f"{experiment}\0{__file__}".encode(errors="replace"))
    return os.path.join(places.cache_home(), "settings", f"{which:08x}")
