"""Ties a process's life to its parent's: prctl(2) PR_SET_PDEATHSIG.

The signal comes when the parent *thread* that started us ends, so children are started from main
threads. A parent that died before the call is noticed by its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_PID_VARIABLE = "REALSYS_PARENT_PID"


def die_with_parent(expected_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends ``death_signal`` to this process when its parent dies.

    Exits at once if the parent is gone already (its pid is no longer ``expected_pid``).
    """
    _prctl(PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != expected_pid:
        os._exit(0)


def adopt_orphans() -> None:
    """From now on children of children that ended are children of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def wait_for_children(timeout_s: float) -> None:
    """Until all children have ended, those adopted too, or ``timeout_s`` is over."""
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
