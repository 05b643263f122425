"""The folders that a box sees: a small root with read-only system folders, and writable memory.

build_root runs once, in the fork server's mount namespace; add_writable in each box, on its copy. A box
with further writable folders gets a root of its own, in which these have a place.
A box can take none of it away: its mount namespace belongs to a lesser user namespace, in which
inherited mounts are locked, and it keeps no capability.
"""

from __future__ import annotations

import os
import site
import stat
import sys
from pathlib import Path

from realsys.rewards.sandbox import kernel_calls as kernel
from realsys.rewards.sandbox.box_limits import BoxLimits

WORK = "/box"  # the program's working folder and home
WRITABLE = [WORK, "/tmp", "/dev/shm"]
BOX_ID = 1000  # uid and gid inside
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"]
_ETC = ["ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types"]
_DEVICES = ["null", "zero", "full", "random", "urandom"]
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_MADE = {
    "etc/passwd": f"box:x:{BOX_ID}:{BOX_ID}:box:{WORK}:/bin/sh\n",
    "etc/group": f"box:x:{BOX_ID}:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_BASE = "/tmp"  # where the root is put together; hidden in this mount namespace only
_KEPT = "/.read_only"  # the folders shown, for those that a writable folder would hide
_RESERVED = [*_SYSTEM, "/etc", "/dev", "/proc", "/sys", "/mnt", _KEPT, *WRITABLE]
_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV


def interpreter_folders() -> list[str]:
    """Returns the folders that this Python and its installed packages need."""
    packages = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
    wanted = [sys.base_prefix, sys.prefix, *packages]
    if os.path.isdir(user := site.getusersitepackages()) and user in sys.path:
        wanted.append(user)
    return outermost(os.path.abspath(path) for path in wanted)


def outermost(paths: object) -> list[str]:
    """Returns the folders that are in no other of them and not among the system's."""
    found: list[str] = []
    for path in sorted(set(paths)):  # type: ignore[call-overload]
        if not any(_is_in(path, folder) for folder in [*_SYSTEM, *found]):
            found.append(path)
    return found


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def hidden_by_writable(paths: list[str], folders: list[str]) -> dict[str, str]:
    """Returns, for each path below a writable folder, where the root keeps it too."""
    writable = [*WRITABLE, *folders]
    return {
        path: kept for path, kept in _kept(paths).items() if any(_is_in(path, f) for f in writable)
    }


def _kept(paths: list[str]) -> dict[str, str]:
    return {path: f"{_KEPT}/{number}" for number, path in enumerate(paths)}


def refused_folders(folders: list[str], read_only: list[str]) -> list[str]:
    """Returns those that can't be writable: no plain absolute path, or one within, above or over
    what the box has already, another of them included; or within a folder that it shows read-only.
    """
    return [
        folder
        for number, folder in enumerate(folders)
        if os.path.normpath(folder) != folder
        or not folder.startswith("/")
        or folder.startswith("//")
        or "\0" in folder
        or any(
            _is_in(folder, other) or _is_in(other, folder)
            for other in [*_RESERVED, *folders[:number]]
        )
        or any(_is_in(folder, path) for path in read_only)
    ]


def build_root(read_only: list[str]) -> None:
    """Puts the root together and moves this process into it. Its mount namespace is its own."""
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    system = [path for path in _SYSTEM if os.path.exists(path)]
    etc = [f"/etc/{name}" for name in _ETC if os.path.exists(f"/etc/{name}")]
    devices = [f"/dev/{name}" for name in _DEVICES]
    shown = {path: path for path in [*system, *etc, *read_only] if not os.path.islink(path)}
    shown |= {kept: path for path, kept in _kept(read_only).items()}
    links = {path: os.readlink(path) for path in system if os.path.islink(path)}
    handles = {p: os.open(p, os.O_PATH | os.O_CLOEXEC) for p in [*shown.values(), *devices]}
    kernel.mount("tmpfs", _BASE, "tmpfs", _SAFE, "size=16m,nr_inodes=4096,mode=755")
    for name, text in _MADE.items():
        Path(_BASE, name).parent.mkdir(parents=True, exist_ok=True)
        Path(_BASE, name).write_text(text)
    for path, target in links.items():
        os.symlink(target, _BASE + path)
    for target, path in shown.items():
        _bind(handles[path], _BASE + target, kernel.MS_RDONLY | _SAFE)
    for path in devices:
        _bind(handles[path], _BASE + path, kernel.MS_NOSUID)
    for name, target in _LINKS.items():
        os.symlink(target, f"{_BASE}/dev/{name}")
    for path in [*WRITABLE, "/proc", "/mnt"]:
        os.makedirs(_BASE + path, exist_ok=True)
    kernel.mount("proc", _BASE + "/proc", "proc", _SAFE | kernel.MS_NOEXEC)
    for handle in handles.values():
        os.close(handle)
    kernel.pivot_into(_BASE)
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _SAFE)


def _bind(handle: int, target: str, flags: int) -> None:
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(f"/proc/self/fd/{handle}", target, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target, flags)


def add_writable(
    limits: BoxLimits, given_bytes: int, read_only: list[str], folders: list[str]
) -> None:
    """Mounts a box's own writable memory and its view of processes. Runs in the box, once."""
    if folders:
        _build_own_root(read_only, folders)
    size = limits.file_bytes + given_bytes
    options = f"size={size},nr_inodes={limits.files + 64},mode=755"
    kernel.mount("tmpfs", "/mnt", "tmpfs", _SAFE, options)
    for number, path in enumerate([*WRITABLE, *folders]):
        os.mkdir(f"/mnt/{number}", 0o755)
        kernel.mount(f"/mnt/{number}", path, flags=kernel.MS_BIND)
    for path, kept in hidden_by_writable(read_only, folders).items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(kept, path, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.unmount("/mnt")
    flags = _SAFE | kernel.MS_NOEXEC | kernel.MS_RDONLY
    kernel.mount("proc", "/proc", "proc", flags)
    kernel.mount("/dev/null", "/proc/keys", flags=kernel.MS_BIND)


def _build_own_root(read_only: list[str], folders: list[str]) -> None:
    """Moves this process into a root with what the present one shows, and places for ``folders``."""
    kernel.mount("tmpfs", "/mnt", "tmpfs", _SAFE, "size=1m,nr_inodes=1024,mode=755")
    shown = [path for path in read_only if path not in hidden_by_writable(read_only, folders)]
    for path in [*_SYSTEM, "/etc", "/dev", "/proc", _KEPT, *shown]:
        if os.path.islink(path):
            os.symlink(os.readlink(path), "/mnt" + path)
        elif os.path.exists(path):
            os.makedirs("/mnt" + path)
            kernel.mount(path, "/mnt" + path, flags=kernel.MS_BIND | kernel.MS_REC)
    for path in [*WRITABLE, *folders, "/mnt"]:
        os.makedirs("/mnt" + path, exist_ok=True)
    kernel.pivot_into("/mnt")
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _SAFE)
