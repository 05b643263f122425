"""Assembles the seccomp filter of a box: a BPF program that refuses dangerous system calls.

Everything else stays allowed: namespaces and mounts decide what the program reaches, the filter
keeps it away from parts of the kernel with a history of holes, and from memory that no limit counts.
Numbers: x86_64 and aarch64, from the kernel's unistd headers.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from functools import lru_cache

from realsys.rewards.sandbox.kernel_calls import PR_SET_SECCOMP, SECCOMP_MODE_FILTER, prctl

# name: number on x86_64, on aarch64 (None: that processor has none)
_ADMINISTER = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "acct": (163, 89),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161),
    "setdomainname": (171, 162), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "iopl": (172, None),
    "ioperm": (173, None), "vhangup": (153, 58),
}  # fmt: skip
_OTHER_PROCESSES = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "move_pages": (279, 239), "migrate_pages": (256, 238),
}  # fmt: skip
_OFTEN_HOLED = {
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "modify_ldt": (154, None),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "personality": (135, 92),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "uselib": (134, None),
    "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None), "vmsplice": (278, 75),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
}  # fmt: skip
_UNCOUNTED_MEMORY = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
# A user has few: other programs of the same user on the node would get none.
_OF_THE_USER = {"inotify_init": (253, None), "inotify_init1": (294, 26)}
DENIED = {**_ADMINISTER, **_OTHER_PROCESSES, **_OFTEN_HOLED, **_UNCOUNTED_MEMORY, **_OF_THE_USER}

_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_SETSOCKOPT, _FCNTL = (54, 208), (72, 25)
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* of clone(2)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: all in the box's own network namespace
_IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into the terminal of another
_SOL_SOCKET = 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and their FORCE forms
_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 1 << 16  # no larger than a new pipe is
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24  # low halves
_THIRD_ARGUMENT_AT = 32
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


@lru_cache(maxsize=1)
def assemble(machine: str) -> bytes:
    """Returns the filter's instructions (struct sock_filter, 8 bytes each) for a processor."""
    column = list(_ARCHITECTURE).index(machine)
    program = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _ARCHITECTURE[machine])]
    program += [(_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    # ENOSYS: libc then uses clone, whose flags a filter can read
    program += [(_EQUAL, 0, 1, _CLONE3[column]), _refuse(errno.ENOSYS)]
    program += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    program += [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    families = [(_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    program += [(_EQUAL, 0, len(_FAMILIES) + 3, _SOCKET[column])]
    program += [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), *families, _refuse(errno.EAFNOSUPPORT)]
    program += [(_RETURN, 0, 0, _ALLOW), (_EQUAL, 0, 5, _IOCTL[column])]
    program += [(_LOAD, 0, 0, _SECOND_ARGUMENT_AT), (_EQUAL, 1, 0, _IOCTLS[0])]
    program += [(_EQUAL, 0, 1, _IOCTLS[1]), _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    sizes = [(_EQUAL, len(_BUFFER_SIZES) - i, 0, name) for i, name in enumerate(_BUFFER_SIZES)]
    program += [(_EQUAL, 0, len(_BUFFER_SIZES) + 5, _SETSOCKOPT[column])]
    program += [
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        (_EQUAL, 0, len(_BUFFER_SIZES) + 1, _SOL_SOCKET),
    ]
    program += [(_LOAD, 0, 0, _THIRD_ARGUMENT_AT), *sizes, (_RETURN, 0, 0, _ALLOW)]
    program += [_refuse(errno.EPERM), (_EQUAL, 0, 4, _FCNTL[column])]
    program += [(_LOAD, 0, 0, _SECOND_ARGUMENT_AT), (_EQUAL, 0, 2, _F_SETPIPE_SZ)]
    program += [(_LOAD, 0, 0, _THIRD_ARGUMENT_AT), (_AT_LEAST, 1, 0, _PIPE_BYTES + 1)]
    program += [(_RETURN, 0, 0, _ALLOW), _refuse(errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _refuse(code: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | code)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install() -> None:
    """Puts the filter on this process and all that it starts. Needs no_new_privs."""
    instructions = assemble(platform.machine())
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _FilterProgram(len(instructions) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))
