"""System calls of namespaces, mounts, capabilities and clone(2) that Python does not have.

Raises OSError as os does. Nothing here decides: see fork_server.py, box_root.py and box_init.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from functools import lru_cache
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
_SIGCHLD = 17
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_MOUNT_FLAGS = {"ro": 0x1, "nosuid": 0x2, "nodev": 0x4, "noexec": 0x8, "noatime": 0x400}
_MOUNT_FLAGS |= {"nodiratime": 0x800, "relatime": 0x200000}
_CAPABILITY_VERSION = 0x20080522


@lru_cache(maxsize=1)
def _libc() -> ctypes.PyDLL:
    """Returns libc, called with Python's lock held: clone(2) must not run beside another thread."""
    return ctypes.PyDLL(None, use_errno=True)


def syscall(number: int, *arguments: object) -> int:
    """Calls syscall(2); plain integers are passed as longs."""
    call = _libc().syscall
    call.restype = ctypes.c_long
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(call(ctypes.c_long(number), *longs), f"syscall {number}")


def _checked(result: int, name: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def supported_machine() -> bool:
    """Returns whether the numbers of this processor's system calls are known."""
    return platform.machine() in _CLONE


def unshare(flags: int) -> None:
    """Moves this process (its next children, for CLONE_NEWPID) into new namespaces."""
    _checked(_libc().unshare(ctypes.c_int(flags)), "unshare")


def clone_process(flags: int) -> int:
    """Forks into new namespaces: returns 0 in the child, its pid in the parent.

    Python is told as os.fork tells it. The caller has one thread, or others that hold no lock.
    """
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    try:
        pid = syscall(_CLONE[platform.machine()], flags | _SIGCHLD, 0, 0, 0, 0)
    except OSError:
        python.PyOS_AfterFork_Parent()
        raise
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    return pid


def map_own_ids(inside_uid: int, inside_gid: int, outside_uid: int, outside_gid: int) -> None:
    """Gives this process's new user namespace the one user and group that it may map."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{inside_gid} {outside_gid} 1")
    Path("/proc/self/uid_map").write_text(f"{inside_uid} {outside_uid} 1")


def bring_up_loopback() -> None:
    """Brings up the loopback interface of this network namespace (netdevice(7), SIOCSIFFLAGS)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Calls mount(2); an empty text is given as NULL."""
    texts = [ctypes.c_char_p(os.fsencode(text) or None) for text in (source, target, kind)]
    more = ctypes.c_char_p(data.encode() or None)
    result = _libc().mount(*texts, ctypes.c_ulong(flags), more)
    _checked(result, f"mount {kind or 'bind'} on {target}")


def unmount(target: str) -> None:
    """Takes a mount, and what is on it, out of the tree."""
    _checked(_libc().umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_into(folder: str) -> None:
    """Makes a mounted folder the root and takes away what was the root."""
    os.chdir(folder)
    here = ctypes.c_char_p(b".")
    syscall(_PIVOT_ROOT[platform.machine()], here, here)  # stacks the old root on the new one
    unmount(".")
    os.chdir("/")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def make_read_only(folder: str, flags: int) -> None:
    """Adds ``flags``, of MS_RDONLY, MS_NOSUID, MS_NODEV, to a mount and all mounts below it."""
    wanted = _MountAttributes(attr_set=flags)  # MOUNT_ATTR_* have the values of these MS_*
    path, size = ctypes.c_char_p(os.fsencode(folder)), ctypes.sizeof(wanted)
    try:
        syscall(_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(wanted), size)
        return
    except OSError as error:
        if error.errno != errno.ENOSYS:  # before Linux 5.12
            raise
    for target, present in mounts_below(folder, Path("/proc/self/mountinfo").read_text()):
        mount("", target, flags=MS_REMOUNT | MS_BIND | present | flags)


def mounts_below(folder: str, mountinfo: str) -> list[tuple[str, int]]:
    """Returns path and flags of the mount at ``folder`` and of those below it; proc(5)."""
    found = []
    for fields in map(str.split, mountinfo.splitlines()):
        path = fields[4].encode().decode("unicode_escape")
        if path == folder or path.startswith(folder.rstrip("/") + "/"):
            flags = sum(_MOUNT_FLAGS.get(name, 0) for name in fields[5].split(","))
            found.append((path, flags))
    return found


def prctl(option: int, value: object = 0, more: object = 0) -> None:
    """Calls prctl(2) with two arguments."""
    values = [ctypes.c_ulong(v) if isinstance(v, int) else v for v in (value, more)]
    zero = ctypes.c_ulong(0)
    _checked(_libc().prctl(ctypes.c_int(option), *values, zero, zero), f"prctl {option}")


def drop_capabilities() -> None:
    """Gives up every capability of this process, and the way to any by a program it starts."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last that this kernel has
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _checked(_libc().capset(ctypes.byref(header), ctypes.byref(none)), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def can_administer() -> bool:
    """Returns whether this process has CAP_SYS_ADMIN and CAP_SETUID, as root on a bare node."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(effective >> bit & 1 for bit in (7, 21))
