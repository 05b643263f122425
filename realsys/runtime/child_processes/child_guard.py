"""Runs a third-party server so that none of its processes outlives this one.

``python -m realsys.runtime.child_processes.child_guard PARENT_PID PROGRAM ARGUMENT…``

Such servers start processes of their own, which may leave their group and outlive their parent. The guard
adopts them all (prctl(2), PR_SET_CHILD_SUBREAPER) and kills them when the server ends, when its own
parent dies, and some seconds after it was asked to end (SIGTERM).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from realsys.runtime.child_processes.parent_death import adopt_orphans, die_with_parent

GRACE_S = 5.0
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_POLL_S = 0.2


def guarded(argv: Sequence[str]) -> list[str]:
    """Returns the command that starts ``argv`` under a guard, a child of this process; for its main
    thread.
    """
    return [
        sys.executable,
        "-P",  # no module is imported from the working folder
        "-m",
        "realsys.runtime.child_processes.child_guard",
        str(os.getpid()),
        *argv,
    ]


def main() -> int:
    """Runs the program; returns its exit code, 128 + signal if one ended it."""
    parent = int(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # received by sigtimedwait only
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    own_pid = os.getpid()

    def become_program() -> None:  # between fork and exec; this process has one thread
        for number in (signal.SIGTERM, signal.SIGINT):  # workers on Slurm ignore them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(own_pid)

    child = subprocess.Popen(sys.argv[2:], preexec_fn=become_program)
    code = _wait(child, parent)
    _kill_descendants()
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes], parent: int) -> int:
    """Waits until the program has ended, or its grace period has passed."""
    deadline_s: float | None = None
    while (code := child.poll()) is None:
        caught = signal.sigtimedwait(_WATCHED, _POLL_S)
        if os.getppid() != parent:
            break
        if caught is not None and caught.si_signo != signal.SIGCHLD and deadline_s is None:
            deadline_s = time.monotonic() + GRACE_S
            child.terminate()
        if deadline_s is not None and time.monotonic() > deadline_s:
            break
    return -signal.SIGKILL if code is None else code


def _kill_descendants() -> None:
    """Kills all descendants repeatedly: orphans are adopted, so a second look finds hidden ones."""
    deadline_s = time.monotonic() + GRACE_S
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Lists children of ``pid``, their children and so on, including zombies."""
    found, ahead = [], [pid]
    while ahead:
        children: list[int] = []
        for tasks in Path(f"/proc/{ahead.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children += [int(child) for child in tasks.read_text().split()]
        found += children
        ahead += children
    return found


if __name__ == "__main__":
    code = main()
    os._exit(code)
