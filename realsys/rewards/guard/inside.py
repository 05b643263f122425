"""Whether this process is the fork of an answer, and what its rule used without having declared it.

A built-in rule that is called by another one asks here, so that it does not start a guard in a guard.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from realsys.api.basics.rule_permissions import RulePermissions

_STARTS = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "subprocess.Popen",
    }
)
_NETWORK = (socket.AF_INET, socket.AF_INET6)
_permissions: RulePermissions | None = None
undeclared: list[tuple[str, str]] = []  # (permission, value), e.g. ("reads", "/data/words")


def is_inside() -> bool:
    """True in a process that only scores answers behind the guard's walls."""
    return _permissions is not None


def enter(permissions: RulePermissions) -> None:
    """Makes this process one that scores, for good."""
    global _permissions
    _permissions = permissions


def watch() -> None:
    """From ``enter`` on, names what is used and was not declared. A hint: the kernel's walls decide."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _permissions is None:
            return
        if event in _STARTS and not _permissions.programs:
            _refuse("programs", event)
        if (
            event == "socket.__new__"
            and not _permissions.network
            and len(arguments) > 1
            and arguments[1] in _NETWORK
        ):
            _refuse("network", event)

    sys.addaudithook(hook)


def _refuse(permission: str, event: str) -> None:
    note(permission, "")
    raise PermissionError(
        errno.EPERM, f"the rule does not declare {permission}=True, and used {event}"
    )


def note(permission: str, value: str) -> None:
    """Remembers what was used without being declared."""
    if (permission, value) not in undeclared and len(undeclared) < 8:
        undeclared.append((permission, value))


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function``, which notes files and variables that it is not given when it raises."""

    def call(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except Exception as error:
            note_denied(error)
            raise

    return call


def note_denied(error: BaseException) -> None:
    """Notes the file or the variable without which a rule raised ``error``."""
    seen: BaseException | None = error
    for _ in range(16):  # causes may go in a circle
        if seen is None:
            return
        if isinstance(seen, PermissionError) and isinstance(seen.filename, str | bytes):
            with suppress(UnicodeDecodeError):
                name = seen.filename
                note("reads", name if isinstance(name, str) else name.decode())
        if isinstance(seen, KeyError) and _is_of_environ(seen):
            note("env", str(seen.args[0]))
        seen = seen.__cause__ or seen.__context__


def _is_of_environ(error: KeyError) -> bool:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_globals.get("__name__") == "os"
