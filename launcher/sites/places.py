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
MAX_GLANCE_BYTES = 512 << 10
# Plain characters in YAML.
_PLAIN = frozenset("/~._- abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


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
            return list(dict.fromkeys(root for root in file.read().split("\0") if root))
    except (OSError, UnicodeError):
        return []


def remember_file_root(root: str) -> None:
    """Makes `realsys status` find trials under ``root``. A cache: a failure to write it is ignored."""
    if root in remembered_file_roots():
        return
    try:
        os.makedirs(state_home(), exist_ok=True)
        # Appended in one write, so that launches at the same time lose none of each other's roots.
        with open(_roots_file(), "ab", buffering=0) as file:
            file.write(b"\0" + root.encode())
    except (OSError, UnicodeError):
        pass


def guess_file_roots() -> list[str]:
    """Guesses the file roots without parsing YAML; for completion only."""
    if fixed := os.environ.get("REALSYS_FILE_ROOT"):
        return [os.path.expanduser(fixed)]
    roots = [plain_file_root(path) or DEFAULT_FILE_ROOT for path in spec_files().values()]
    return list(dict.fromkeys([*map(os.path.expanduser, roots), *remembered_file_roots()]))


def plain_file_root(spec_file: str) -> str | None:
    """Returns the file root of a spec if it can be read without parsing YAML; else None."""
    try:
        if not os.path.isfile(spec_file) or os.path.getsize(spec_file) > MAX_GLANCE_BYTES:
            return None
        with open(spec_file, encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, UnicodeError):
        return None
    at = [i for i, line in enumerate(lines) if "file_root" in line and line.lstrip()[0] != "#"]
    if not at:
        return DEFAULT_FILE_ROOT
    name, _, value = lines[at[0]].partition(":")
    value = value.partition(" #")[0].strip()
    if value[:1] in ("'", '"') and value[:1] == value[-1:]:
        value = value[1:-1]
    is_plain = value[:1] in ("/", "~") and "/" in value and _PLAIN.issuperset(value)
    goes_on = any(line[0].isspace() for line in lines[at[0] + 1 : at[0] + 2])
    return value if [name] * len(at) == ["file_root"] and is_plain and not goes_on else None


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
