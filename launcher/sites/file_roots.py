"""The file roots below which trials may be, for every verb that takes a TRIAL.

Reads a whole cluster spec only where it can't do without: a spec with mistakes must not hide trials, and
the classes of a spec take long to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.sites import places
from realsys.api.errors import ConfigError
from realsys.trial.folders import absolute_root, own_root, top_of


def file_roots(wanted: str | None = None) -> list[str]:
    """Lists the roots where trials may be: of the given cluster, else of every known one.

    Raises:
        ConfigError: no such cluster, or mistakes in its spec (all of them).
    """
    if wanted:
        return _with_shared([_of_spec(wanted)])
    if fixed := os.environ.get("REALSYS_FILE_ROOT"):
        return _with_shared([_own(fixed)])
    if name := os.environ.get("REALSYS_CLUSTER"):
        plain = places.plain_file_root(places.spec_files().get(name, ""))
        return _with_shared([_own(plain) if plain else _of_spec(name)])
    return _with_shared([*_of_all_specs(), *places.remembered_file_roots()])


def _of_all_specs() -> Iterator[str]:
    """Skips specs whose root can't be read: `plan --cluster` reports it."""
    for path in places.spec_files().values():
        try:
            plain = places.plain_file_root(path)
            yield _own(plain) if plain else _of_spec(path)
        except ConfigError:
            continue


def _of_spec(wanted: str) -> str:
    from launcher.sites.clusters import find_cluster

    return find_cluster(wanted).file_root


def _own(root: str) -> str:
    return own_root(absolute_root(root), places.user_name())


def _with_shared(roots: Sequence[str]) -> list[str]:
    """Removes repeats, and adds to a user's own root the shared root around it, with its older trials."""
    return list(dict.fromkeys(r for root in roots for r in (root, str(top_of(Path(root))))))
