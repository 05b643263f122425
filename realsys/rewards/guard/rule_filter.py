"""Assembles the seccomp filter of an answer's fork: what a rule may not ask of the kernel.

It denies what sandbox/seccomp_filter.py denies in boxes, and, unless the rule declares them, sockets and
new processes; signals to other processes; and changes of modes, owners and times of files, which Landlock
doesn't know. Everything else that concerns files is Landlock's (rule_walls.py). In two parts: most of it
stands around the process that forks already, so that a fork needs a short one.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from realsys.rewards.sandbox.kernel_calls import PR_SET_SECCOMP, SECCOMP_MODE_FILTER, prctl
from realsys.rewards.sandbox.seccomp_filter import DENIED

# name: number on x86_64, on aarch64 (None: that processor has none)
_ALWAYS = {
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "shmat": (30, 196),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "mknod": (133, None),
    "mknodat": (259, 33),
}  # fmt: skip
# Done as far as the rule can tell: copying a file does it, and fails if it is refused.
_WITHOUT_EFFECT = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
_STARTS = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None),
}  # fmt: skip
# The first argument is the process whose limits or whose end it is about.
_OF_A_PROCESS = {
    "kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
_PRLIMIT, _CLONE, _CLONE3, _SOCKET, _IOCTL = (302, 261), (56, 220), (435, 435), (41, 198), (16, 29)
_THREAD, _NEW_NAMESPACES = 0x00010000, 0x7E020000  # CLONE_THREAD; every CLONE_NEW*
_FAMILIES = (2, 10)  # AF_INET, AF_INET6
_IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into the terminal of another
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24  # low halves
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]


def assemble_common(machine: str, *, network: bool, programs: bool) -> bytes:
    """Returns the instructions (struct sock_filter, 8 bytes each) for what forks, and its forks.

    Not denied is what it does itself: to fork, and to end its forks.
    """
    column = list(_ARCHITECTURE).index(machine)
    refused = {name: (numbers, errno.EPERM) for name, numbers in {**DENIED, **_ALWAYS}.items()}
    refused |= {} if programs else {n: (numbers, 0) for n, numbers in _WITHOUT_EFFECT.items()}
    program = _beginning(machine)
    for numbers, code in refused.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), _refuse(code)]
    # ENOSYS: libc then uses clone, whose flags a filter can read
    program += [(_EQUAL, 0, 1, _CLONE3[column]), _refuse(errno.ENOSYS)]
    program += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    program += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    program += _of_sockets(_SOCKET[column], network)
    program += [(_EQUAL, 0, 4, _IOCTL[column]), (_LOAD, 0, 0, _SECOND_ARGUMENT_AT)]
    program += [(_EQUAL, 1, 0, _IOCTLS[0]), (_EQUAL, 0, 1, _IOCTLS[1]), _refuse(errno.EPERM)]
    return _packed([*program, (_RETURN, 0, 0, _ALLOW)])


def assemble_own(machine: str, *, pid: int) -> bytes:
    """Returns the instructions for a fork that may start nothing, and signal only itself, ``pid``."""
    column = list(_ARCHITECTURE).index(machine)
    program = _beginning(machine)
    for numbers in _STARTS.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    for numbers in _OF_A_PROCESS.values():
        program += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
        program += [(_EQUAL, 0, 1, pid), (_RETURN, 0, 0, _ALLOW), _refuse(errno.EPERM)]
    program += [(_EQUAL, 0, 5, _PRLIMIT[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    program += [(_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, pid), (_RETURN, 0, 0, _ALLOW)]
    program += [_refuse(errno.EPERM), (_EQUAL, 0, 3, _CLONE[column])]
    program += [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_ANY_BIT, 1, 0, _THREAD)]
    return _packed([*program, _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)])


def _beginning(machine: str) -> list[Instruction]:
    found: list[Instruction] = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _ARCHITECTURE[machine])]
    found += [(_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        found += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    return found


def _of_sockets(number: int, network: bool) -> list[Instruction]:
    if not network:
        return [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    families = [(_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    return [
        (_EQUAL, 0, len(_FAMILIES) + 3, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        *families,
        _refuse(errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refuse(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _packed(program: list[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class _RuleFilter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(instructions: bytes) -> None:
    """Puts a filter on this process and all that it starts. Needs no_new_privs."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _RuleFilter(len(instructions) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def supported_here() -> bool:
    """Returns whether the numbers of this processor's system calls are known."""
    return platform.machine() in _ARCHITECTURE
