"""System calls that a Python build may lack although the kernel has them.

``os`` has memfd_create and pidfd_open, and ``signal`` pidfd_send_signal, only if Python was *built*
with a new enough libc and kernel headers. The builds of uv and conda-forge were not: there the
kernel is called directly.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal

from realsys.api.errors import ClusterError

# <linux/memfd.h>, <linux/fcntl.h>: the same on every processor.
MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434  # the same on every processor
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350, "riscv64": 279}


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """Calls os.memfd_create: returns the descriptor of a file without a name. Raises OSError."""
    if made := getattr(os, "memfd_create", None):
        return int(made(name, flags))
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"memfd_create is not known for {platform.machine()}")
    return _syscall(number, ctypes.c_char_p(os.fsencode(name)), ctypes.c_uint(flags))


def pidfd_open(pid: int) -> int:
    """Calls os.pidfd_open: returns a descriptor of the process, which can be polled for its end.

    Raises:
        ClusterError: the kernel lacks the call. OSError: no such process, no descriptor left.
    """
    try:
        if opened := getattr(os, "pidfd_open", None):
            return int(opened(pid))
        return _syscall(PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise ClusterError(
            f"this kernel, Linux {platform.release()}, has no pidfd_open(2)",
            where=platform.node(),
            fix="run on nodes with Linux 5.3 or later, or a distribution's kernel that has it; "
            "`realsys doctor` shows which nodes do",
        ) from error


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Calls signal.pidfd_send_signal. Raises ProcessLookupError if the process has ended."""
    if send := getattr(signal, "pidfd_send_signal", None):
        send(pidfd, number)
        return
    _syscall(PIDFD_SEND_SIGNAL, ctypes.c_int(pidfd), ctypes.c_int(number), None, ctypes.c_uint(0))


def _syscall(number: int, *arguments: object) -> int:
    """Calls syscall(2) and raises its error as Python does, ProcessLookupError included."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    result = int(call(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
