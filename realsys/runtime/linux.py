"""System calls that a Python may lack although the kernel has them.

``os`` has memfd_create and pidfd_open, and ``signal`` pidfd_send_signal, only where Python was *built*
with a new enough libc and kernel headers. Those that uv and conda-forge bring were not: there the kernel
is called directly. For every room that needs one of the three, hence in api; decides nothing.
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
    """os.memfd_create: the descriptor of a file without a name. Raises OSError."""
    if made := getattr(os, "memfd_create", None):
        return int(made(name, flags))
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"memfd_create is not known for {platform.machine()}")
    return _syscall(number, ctypes.c_char_p(os.fsencode(name)), ctypes.c_uint(flags))


def pidfd_open(pid: int) -> int:
    """os.pidfd_open: a descriptor of that process, which can be polled for its end.

    Raises:
        ClusterError: the kernel has none. OSError: no such process, no descriptor left.
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
            "`realsys doctor` says which have",
        ) from error


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """signal.pidfd_send_signal. Raises ProcessLookupError when the process has ended."""
    if send := getattr(signal, "pidfd_send_signal", None):
        send(pidfd, number)
        return
    _syscall(PIDFD_SEND_SIGNAL, ctypes.c_int(pidfd), ctypes.c_int(number), None, ctypes.c_uint(0))


def _syscall(number: int, *arguments: object) -> int:
    """syscall(2) with its error as Python has it, ProcessLookupError and all."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    result = int(call(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
