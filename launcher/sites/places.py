"""Locations known before any plan is read: user name, settings, cluster specs, file roots.

For every command, completion included, so it imports only the standard library. It parses no YAML
(clusters.py does) and knows no path inside a trial (realsys.trial.records does).
"""

from __future__ import annotations

import os
import pwd

DEFAULT_FILE_ROOT = "~/.local/share/realsys"  # as in ClusterSpec; a test compares them
SPEC_ENDINGS = (".yaml", ".yml")
EXAMPLE_PREFIX = "example_"  # templates, not sites


def user_name() -> str:
    """Returns the submitting user; ``uid<N>`` if the user database has no entry (containers)."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid{os.getuid()}"


def config_home() -> str:
    """Returns ``$XDG_CONFIG_HOME/realsys``."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def state_home() -> str:
    """Returns ``$XDG_STATE_HOME/realsys``."""
    return _xdg("XDG_STATE_HOME", ".local", "state")


def cache_home() -> str:
    """Returns ``$XDG_CACHE_HOME/realsys``."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def spec_folders() -> list[str]:
    """Lists the folders of cluster specs; the user's own before those shipped with the package."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [os.path.join(config_home(), "clusters"), os.path.join(package, "cluster_specs")]


def spec_files(*, examples: bool = False) -> dict[str, str]:
    """Maps cluster names to their files; includes shipped examples only if ``examples``."""
    found: dict[str, str] = {}
    folders = spec_folders()
    for folder in folders:
        for entry in _listed(folder):
            stem, ending = os.path.splitext(entry)
            shipped_example = folder == folders[-1] and stem.startswith(EXAMPLE_PREFIX)
            if ending in SPEC_ENDINGS and (examples or not shipped_example):
                found.setdefault(stem, os.path.join(folder, entry))
    return found


def remembered_file_roots() -> list[str]:
    """Lists the file roots of launches with a spec file from elsewhere (``--cluster ./my.yaml``)."""
    try:
        with open(_roots_file(), encoding="utf-8") as file:
            return [root for root in file.read().split("\0") if root]
    except (OSError, UnicodeError):
        return []


def remember_file_root(root: str) -> None:
    """Makes `realsys status` find trials under ``root``. A cache: a failure to write it is ignored."""
    roots = remembered_file_roots()
    if root in roots:
        return
    try:
        os.makedirs(state_home(), exist_ok=True)
        with open(_roots_file(), "w", encoding="utf-8") as file:
            file.write("\0".join([*roots, root]))
    except OSError:
        pass


def guess_file_roots() -> list[str]:
    """Guesses the file roots without parsing YAML; for completion only."""
    if fixed := os.environ.get("REALSYS_FILE_ROOT"):
        return [os.path.expanduser(fixed)]
    roots = [_glance(path) for path in spec_files().values()]
    return list(dict.fromkeys([*roots, *remembered_file_roots()]))


def _glance(spec_file: str) -> str:
    try:
        with open(spec_file, encoding="utf-8") as file:
            for line in file:
                if line.startswith("file_root:"):
                    value = line.partition(":")[2].split(" #")[0].strip().strip("\"'")
                    return os.path.expanduser(value)
    except (OSError, UnicodeError):
        pass
    return os.path.expanduser(DEFAULT_FILE_ROOT)


def _roots_file() -> str:
    return os.path.join(state_home(), "file_roots")  # NUL-separated: a path may contain a newline


def _xdg(variable: str, *default: str) -> str:
    base = os.environ.get(variable) or os.path.join(os.path.expanduser("~"), *default)
    return os.path.join(base, "realsys")


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
