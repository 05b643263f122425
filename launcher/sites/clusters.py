"""Finds and reads the description of a site (realsys.api.cluster.ClusterSpec).

Order: `--cluster NAME|PATH`, then REALSYS_CLUSTER, then `local`. A name is looked up among the user's own
specs (`~/.config/realsys/clusters/`) and those shipped in `cluster_specs/`, where names that begin with
`example_` are templates, not sites. REALSYS_FILE_ROOT overrides the spec's file root. A root shared by
users has a folder for each. Checks that trials can be written there; creates nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from launcher.sites import places
from launcher.sites.site_problems import cluster_problems
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    UnknownName,
    collected,
    did_you_mean,
    raise_all,
)
from realsys.config.overrides import apply_overrides
from realsys.config.settings import read_yaml
from realsys.trial.folders import absolute_root, check_folders, own_root


def find_cluster(wanted: str | None = None) -> ClusterSpec:
    """Finds the site to use, with an absolute file root and the address of its store.

    Raises:
        ConfigError: no such spec, or mistakes in it (all of them).
    """
    wanted = wanted or os.environ.get("REALSYS_CLUSTER") or "local"
    return read_spec(spec_path(wanted))


def spec_path(wanted: str) -> Path:
    """Returns the file of a name or a path (anything with a slash or a YAML ending).

    Raises:
        ConfigError: no spec of that name, or an example.
    """
    if "/" in wanted or wanted.endswith(places.SPEC_ENDINGS):
        return Path(wanted).expanduser()
    known = places.spec_files()
    if wanted not in known and wanted in places.spec_files(examples=True):
        raise ConfigError(
            f"{wanted} is an example, not a site",
            where=places.spec_files(examples=True)[wanted],
            fix=f"copy it to {places.spec_folders()[0]}/NAME.yaml and edit it, or run `realsys "
            "clusters init NAME`",
        )
    if wanted not in known:
        raise UnknownName(
            f"no cluster spec called {wanted!r}",
            where=", ".join(places.spec_folders()),
            fix=f"{did_you_mean(wanted, known)} (a path to a YAML file works too)",
        )
    return Path(known[wanted])


def read_spec(path: Path) -> ClusterSpec:
    """Reads the spec in ``path``; a spec without a name is named after its file.

    Raises:
        ConfigError: the file can't be read, or has mistakes (all of them, with their lines).
    """
    problems: list[ConfigError] = []
    applied = apply_overrides(ClusterSpec(name=path.stem), read_yaml(path, problems))
    problems += applied.problems
    spec: ClusterSpec = applied.options
    with collected(problems):
        root = absolute_root(os.environ.get("REALSYS_FILE_ROOT") or spec.file_root)
        root = own_root(root, places.user_name())
        # The store's address is a URL: a space, %, # or line break in the path must not end it.
        store = spec.name_resolve or f"file://{quote(root)}/name_resolve"
        venv = os.path.expanduser(spec.venv) if spec.venv else None
        spec = replace(spec, file_root=root, name_resolve=store, venv=venv)
        problems += [_with_line(p, applied.origins, path) for p in cluster_problems(spec)]
    raise_all(problems)
    return spec


def new_spec_file(name: str) -> Path:
    """Returns the path for a new spec of that name, in the user's own folder.

    Raises:
        ConfigError: invalid file name, or the file exists.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(
            f"{name!r} can't name a site",
            where="command line",
            fix="use letters, digits, dots, dashes and underscores",
        )
    folder = places.spec_folders()[0]
    there = [p for e in places.SPEC_ENDINGS if os.path.lexists(p := f"{folder}/{name}{e}")]
    if there:
        raise ConfigError(
            "the file exists already and is not overwritten",
            where=there[0],
            fix="choose another name, or move the file away",
        )
    return Path(folder, f"{name}{places.SPEC_ENDINGS[0]}")


def write_spec(name: str, text: str) -> Path:
    """Writes a new spec into the user's own folder; never overwrites one.

    Raises:
        ConfigError: see new_spec_file. ClusterError: it can't be written.
    """
    path = new_spec_file(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ClusterError(
            f"the file can't be written: {error.strerror}",
            where=str(path),
            fix="check permission and space, or write it by hand: realsys clusters init",
        ) from error
    return path


def _with_line(problem: ConfigError, origins: Mapping[str, str], path: Path) -> ConfigError:
    """Adds the line of the option concerned, or the file, to the problem."""
    origin = origins.get(problem.where, str(path))
    return ConfigError(problem.what, where=f"{problem.where}, {origin}", fix=problem.fix)


def check_writable(root: str) -> None:
    """Raises ClusterError unless trials can be written under ``root`` and no other user could replace
    them.

    ``root`` need not exist yet.
    """
    existing = Path(root)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ClusterError(
            f"{existing} is not a folder",
            where=f"file_root {root}",
            fix="set file_root in the cluster spec, or REALSYS_FILE_ROOT, to a folder",
        )
    check_folders(Path(root), root=Path(root))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ClusterError(
            f"no permission to write in {existing}",
            where=f"file_root {root}",
            fix=f"set REALSYS_FILE_ROOT to a folder of yours, or ask the owner of {existing}",
        )


def check_store(spec: ClusterSpec) -> None:
    """Raises ClusterError if the store is a folder that another user owns or could replace.

    Workers execute commands from the store. The folder need not exist yet.
    """
    url = spec.name_resolve or ""
    if not url.startswith("file://"):
        return
    folder = Path(unquote(url.removeprefix("file://")))
    try:
        check_folders(folder, root=folder)
    except ClusterError as error:
        raise ClusterError(
            f"another user can change the name-resolution store: {error.what}",
            where=f"name_resolve {url}",
            fix="leave name_resolve out of the site file (then each user has a folder), or use an etcd",
        ) from error
