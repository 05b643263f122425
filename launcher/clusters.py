"""Finds and reads the description of a site (realsys.api.cluster.ClusterSpec).

Order: `--cluster NAME|PATH`, then REALSYS_CLUSTER, then `local`. A name is looked up among the user's
own specs (`~/.config/realsys/clusters/`) and those shipped in `cluster_specs/`. REALSYS_FILE_ROOT
overrides the spec's file root. Checks that trials can be written there; creates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from launcher import places
from launcher.overrides import put_on
from launcher.problems import raise_all
from launcher.settings import read_yaml
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError, UnknownName, did_you_mean


def find_cluster(wanted: str | None = None) -> ClusterSpec:
    """The site to use, with an absolute file root and the address of its store.

    Raises:
        ConfigError: no such spec, or mistakes in it (all of them).
    """
    wanted = wanted or os.environ.get("REALSYS_CLUSTER") or "local"
    return read_spec(spec_path(wanted))


def spec_path(wanted: str) -> Path:
    """The file of a name or a path (anything with a slash or a YAML ending)."""
    if "/" in wanted or wanted.endswith(places.SPEC_ENDINGS):
        return Path(wanted).expanduser()
    known = places.spec_files()
    if wanted not in known:
        raise UnknownName(
            f"no cluster spec called {wanted!r}",
            where=", ".join(places.spec_folders()),
            fix=f"{did_you_mean(wanted, known)} (a path to a YAML file works too)",
        )
    return Path(known[wanted])


def read_spec(path: Path) -> ClusterSpec:
    """The spec in ``path``; unnamed specs are called after their file."""
    problems: list[ConfigError] = []
    applied = put_on(ClusterSpec(name=path.stem), read_yaml(path, problems))
    raise_all([*problems, *applied.problems])
    spec: ClusterSpec = applied.options
    root = absolute_root(os.environ.get("REALSYS_FILE_ROOT") or spec.file_root)
    # The store's address is a URL: a space, %, # or line break in the path must not end it.
    store = spec.name_resolve or f"file://{quote(root)}/name_resolve"
    return replace(spec, file_root=root, name_resolve=store)


def absolute_root(root: str) -> str:
    """``root`` with ~ expanded, absolute. Raises ConfigError if it can't be a path in a plan."""
    if "\0" in root or not root.strip():
        raise ConfigError(
            f"file_root is {root!r}", where="file_root", fix="give the path of a folder"
        )
    try:
        root.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"file_root {root!r} is not UTF-8", where="file_root", fix="rename the folder"
        ) from None
    return os.path.abspath(os.path.expanduser(root))


def check_writable(root: str) -> None:
    """Raises ClusterError unless trials can be written under ``root``, which need not exist yet."""
    existing = Path(root)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ClusterError(
            f"{existing} is not a folder",
            where=f"file_root {root}",
            fix="set file_root in the cluster spec, or REALSYS_FILE_ROOT, to a folder",
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ClusterError(
            f"no permission to write in {existing}",
            where=f"file_root {root}",
            fix=f"set REALSYS_FILE_ROOT to a folder of yours, or ask the owner of {existing}",
        )


def file_roots(wanted: str | None = None) -> list[str]:
    """Where trials may be: of the given cluster, else of every known one. Skips broken specs."""
    if wanted or os.environ.get("REALSYS_CLUSTER") or os.environ.get("REALSYS_FILE_ROOT"):
        return [find_cluster(wanted).file_root]
    roots = []
    for path in places.spec_files().values():
        try:
            roots.append(read_spec(Path(path)).file_root)
        except ConfigError:
            continue  # `plan --cluster` says what is wrong with it; it must not hide other trials
    return list(dict.fromkeys([*roots, *places.remembered_file_roots()]))


def missing_secrets(spec: ClusterSpec, environ: Mapping[str, str]) -> Iterator[ConfigError]:
    """Secrets that the site names and this shell does not have."""
    yield from ()
