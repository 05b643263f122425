"""Headers whose values are secrets: a setting names the variable or the file that holds each. No SDK."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from realsys.api.basics.bounded_files import open_regular
from realsys.api.errors import ConfigError

_WHERE = "task.env_args.headers"
_MOST_BYTES = 1 << 16
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises ConfigError if a header's name is none, or its value names no variable and no file."""
    for name, value in headers.items():
        if not name or not _TOKEN.issuperset(name):
            raise ConfigError(
                f"{name!r} is no name of a header", where=_WHERE, fix="write e.g. Authorization"
            )
        scheme, kind, source = _parts(value)
        if not source or (scheme and not _TOKEN.issuperset(scheme)):
            raise ConfigError(  # without the value, which may be the secret
                f"the header {name} does not say where its value is",
                where=f"{_WHERE}.{name}",
                fix="name a variable or a file, and a scheme before it if there is one: "
                "env:MY_KEY, 'Bearer env:MY_KEY', file:~/.keys/search",
            )
        if kind == "env" and not source.isidentifier():
            raise ConfigError(
                f"{source!r} is no name of an environment variable",
                where=f"{_WHERE}.{name}",
                fix="write env:NAME, without $",
            )


def header_values(headers: Mapping[str, str]) -> dict[str, str]:
    """Reads the values of headers, as this process has them.

    Raises:
        ConfigError: a variable is not set, a file can't be read, or others can read it.
    """
    found = {}
    for name, value in headers.items():
        scheme, kind, source = _parts(value)
        where = f"{_WHERE}.{name}"
        secret = _of_variable(source, where) if kind == "env" else _of_file(source, where)
        if not secret or not secret.isascii() or not secret.isprintable():
            raise ConfigError(
                f"{kind}:{source} holds no value of a header",
                where=where,
                fix="it takes one line of printable ASCII",
            )
        found[name] = f"{scheme} {secret}" if scheme else secret
    return found


def _parts(value: str) -> tuple[str, str, str]:
    """Returns scheme, ``env`` or ``file``, and the name behind the colon; empty: there is none."""
    first, _, rest = value.strip().partition(" ")
    scheme, source = ("", value.strip()) if first.startswith(("env:", "file:")) else (first, rest)
    kind, colon, name = source.strip().partition(":")
    return (scheme, kind, name) if colon and kind in ("env", "file") else (scheme, "", "")


def _of_variable(name: str, where: str) -> str:
    if name not in os.environ:
        raise ConfigError(
            f"the variable {name} is not set in the rollout worker",
            where=where,
            fix="export it before the launch; on Slurm name it in the site file's secrets, too",
        )
    return os.environ[name].strip()


def _of_file(name: str, where: str) -> str:
    path = Path(name).expanduser()
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}",
            where=where,
            fix="the rollout workers' nodes must see it",
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"{path} has mode {mode:04o}: others can read it",
            where=where,
            fix=f"chmod 600 {path}; change the key if others may have read it",
        )
    return text
