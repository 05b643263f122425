"""Ends a process when its parent dies: prctl(2) PR_SET_PDEATHSIG.

The signal is sent when the parent *thread* that started the process ends, so children are started
from main threads. A parent that died before the call is detected by its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_PID_VARIABLE = "REALSYS_PARENT_PID"


def die_with_parent(expected_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send ``death_signal`` to this process when its parent dies.

    Exits at once if the parent has already died (its pid is no longer ``expected_pid``).
    """
    _prctl(PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != expected_pid:
        os._exit(0)


def tied(argv: Sequence[str]) -> list[str]:
    """Returns the command that starts ``argv`` as a child tied to this process. Start it from the main
    thread: the signal is sent when the starting thread ends.

    The tie survives exec(2), so it works for any program. Done by a program of its own because code
    between fork and exec (preexec_fn) is not safe beside other threads.
    """
    return [
        sys.executable,
        "-P",  # no module is imported from the working folder
        "-m",
        "realsys.runtime.child_processes.parent_death",
        str(os.getpid()),
        *argv,
    ]


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def wait_for_children(timeout_s: float) -> None:
    """Waits until all children have ended, adopted ones included, or ``timeout_s`` has passed."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.02)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def main() -> None:
    """``PARENT_PID PROGRAM ARGUMENT…``: becomes the program, which ends when its parent does."""
    parent, *argv = sys.argv[1:]
    die_with_parent(int(parent))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
