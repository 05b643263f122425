"""Whether this process is the fork of an answer, and what its rule used without having declared it.

A built-in rule that is called by another one asks here, so that it does not start a guard in a guard.
"""

from __future__ import annotations

import errno
import socket
import sys
import traceback
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
# (permission, value) of what was used without being declared, e.g. ("reads", "/data/words"); and
# ("raised_at", "rules.py:12"), where the rule raised.
notes: list[tuple[str, str]] = []


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
    if _permissions is not None and (permission, value) not in notes and len(notes) < 8:
        notes.append((permission, value))


def note_raised(error: BaseException) -> None:
    """Notes where a rule raised ``error``, and the file or the variable that it lacked."""
    if _permissions is None:
        return
    if frames := traceback.extract_tb(error.__traceback__):
        note("raised_at", f"{frames[-1].filename}:{frames[-1].lineno}")
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
