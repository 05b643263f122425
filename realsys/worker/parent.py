"""Ties a process's life to its parent's: prctl(2) PR_SET_PDEATHSIG.

The signal comes when the parent *thread* that started us ends, so children are started from main
threads. A parent that died before the call is noticed by its pid.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PARENT_PID_VARIABLE = "REALSYS_PARENT_PID"


def die_with_parent(expected_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends ``death_signal`` to this process when its parent dies.

    Exits at once if the parent is gone already (its pid is no longer ``expected_pid``).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != expected_pid:
        os._exit(0)
