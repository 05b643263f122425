"""Identity of the process that holds a lease, so that a reader on the same host detects at once
that it is dead.

For the file store. A process is identified by boot, PID namespace, PID and start time: a PID alone
is reused, and the same number in two containers is two processes. Answers only "known to be dead":
a process of another host, boot or container is judged by its lease.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a process across hosts, boots and containers."""

    host: str  # for display; never compared
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int  # clock ticks after boot; 0 if /proc is unavailable


def this_process() -> ProcessIdentity:
    return _identity_of(os.getpid())  # differs after a fork


def is_known_dead(process: ProcessIdentity) -> bool:
    """Returns whether ``process`` is known to have ended. A zombie has."""
    here = this_process()
    if (process.boot_id, process.pid_namespace) != (here.boot_id, here.pid_namespace):
        return False
    if not process.start_ticks:
        return False
    state = _state_and_start(process.pid)
    if state is None:
        return not _signallable(process.pid)  # /proc may hide other users' processes
    return state[0] in ("Z", "X") or state[1] != process.start_ticks


@lru_cache(maxsize=4)
def _identity_of(pid: int) -> ProcessIdentity:
    state = _state_and_start(pid)
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc: leases are judged by their counter alone
        boot_id, namespace, state = "", "", None
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=boot_id,
        pid_namespace=namespace,
        pid=pid,
        start_ticks=state[1] if state else 0,
    )


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name is in brackets and may contain blanks and brackets itself: proc(5).
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


def _signallable(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
