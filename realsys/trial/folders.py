"""Creates and checks folders that no other user can replace or write into.

A user who can write a trial's folder, or replace a folder above it, controls what its owner's
processes run. So from the file root down each folder must belong to its user (or the superuser) and
not be writable by others. A folder that others may write, such as a root that users share, is
accepted if it is sticky (others can't remove or rename our entries in it) and is not the trial's
own. Used by launches, by a job's first process and by `realsys doctor`. What is above the file root
is the user's decision. Nothing here reads a file of a trial.

A shared root has a folder for each user, ``<root>/realsys-<user>``, which is the file root of all
that user's plans (``own_root``): no user's folder is inside another's.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from realsys.api.errors import ClusterError, ConfigError
from realsys.trial.records import TrialFiles

READABLE, PRIVATE = 0o755, 0o700  # others may read, subject to the umask; owner only
OWN_PREFIX = "realsys-"
ANYBODY = "anybody"
_ACL = "system.posix_acl_access"
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """Type, owner and permissions of one path component of a trial.

    Attributes:
        kind: folder, link or file.
        owner: uid.
        open_to: who else may write there, in words; empty: no one.
        sticky: others can't remove or rename entries that are not theirs.
    """

    path: str
    kind: str
    owner: int
    open_to: str
    sticky: bool


def weakness(facts: FolderFacts, *, uid: int, shared: bool) -> tuple[str, str]:
    """Returns how another user could replace the folder's contents, and the fix; empty if
    impossible (pure).

    Args:
        uid: the trial's owner.
        shared: whether others may create entries of their own there.
    """
    path = facts.path
    if facts.kind != "folder":
        owner = "of yours" if facts.owner == uid else f"that belongs to {user_of(facts.owner)}"
        return f"{path} is not a folder but a {facts.kind} {owner}", _or_other_root(
            "find out who put it there"
        )
    if facts.owner not in (uid, 0):
        return (
            f"{path} belongs to {user_of(facts.owner)}, who could replace your files in it",
            _or_other_root(
                "if it is to be shared, an administrator must own it: chown root, chmod 1777"
            ),
        )
    if not facts.open_to or (facts.sticky and shared):
        return "", ""
    verb = "chmod +t" if shared else "chmod go-w"
    who = "run" if facts.owner == uid else f"ask {user_of(facts.owner)} for"
    return (
        f"{path} can be written by {facts.open_to}, who could replace your files in it",
        _or_other_root(f"{who}: {verb} {shlex.quote(path)}"),
    )


def _or_other_root(first: str) -> str:
    return f"{first}; or set REALSYS_FILE_ROOT to a folder that only you can write"


def absolute_root(root: str) -> str:
    """Expands ~ and makes ``root`` absolute. Raises ConfigError if it can't be a path in a plan."""
    if "\0" in root or not root.strip():
        raise ConfigError(
            f"file_root is {root!r}", where="file_root", fix="give the path of a folder"
        )
    try:
        root.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"file_root {root!r} is not UTF-8", where="file_root", fix="rename the folder"
        ) from None
    return os.path.abspath(os.path.expanduser(root))


def own_root(root: str, user: str) -> str:
    """Returns the user's file root under ``root``: ``root`` itself, or a folder in it if it is
    shared."""
    try:
        found = os.stat(root)
    except OSError:
        return root
    return os.path.join(root, OWN_PREFIX + user) if is_shared(found, os.getuid()) else root


def is_shared(found: os.stat_result, uid: int) -> bool:
    """Returns whether a folder belongs to another user or is writable by others on purpose, that is
    sticky (pure)."""
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid != uid or bool(others_write and found.st_mode & stat.S_ISVTX)


def root_of(trial: Path) -> Path:
    """Returns the file root of ``<root>/runs/<user>/<experiment>/<trial>``."""
    return trial.parents[min(3, len(trial.parents) - 1)]


def top_of(root: Path) -> Path:
    """Returns the topmost folder to check: the shared root if ``root`` is a user's own folder in
    it."""
    return root.parent if root.name.startswith(OWN_PREFIX) else root


def check_folders(target: Path, *, root: Path) -> None:
    """Checks every existing folder from the file root down to ``target``.

    Raises:
        ClusterError: another user could replace one of them.
    """
    with _opened(target, root=root):
        pass


def make_folders(target: Path, *, root: Path, mode: int = READABLE) -> None:
    """Checks as ``check_folders`` does and creates missing folders, closed to others' writing
    whatever the umask.

    Raises:
        ClusterError: another user could replace one of them. OSError: the file system refuses.
    """
    with _opened(target, root=root, mode=mode):
        pass


def make_trial_folder(files: TrialFiles, *, root: Path) -> None:
    """Creates a new trial's folder with its private parts, and missing folders from the file root
    down.

    Raises:
        FileExistsError: the trial exists. ClusterError: another user could replace a parent folder.
    """
    with _opened(files.root.parent, root=root, mode=READABLE) as parent:
        _make(files.root.name, parent, READABLE)
    with _opened(files.root, root=root) as folder:
        for private in (files.secrets, files.submitit):
            _make(private.name, folder, PRIVATE)


def check_trial(files: TrialFiles) -> None:
    """Checks a trial's folder, its parents and the entries in it that decide what runs.

    The file root is derived from the path, not from the plan, which is not trusted yet.

    Raises:
        ClusterError: another user could replace one, or could have.
    """
    root = root_of(files.root)
    for part in (files.secrets, files.submitit, files.attempts, files.code, files.plans):
        check_folders(part, root=root)
    for file in (files.plan, files.record):
        try:
            found = file.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), 0):
            raise ClusterError(
                f"{file.name} is not a file of yours (it is {user_of(found.st_uid)}'s)",
                where=str(file),
                fix="find out who put it there; launch a new trial",
            )


def check_ours(files: TrialFiles) -> None:
    """Checks that a trial's records belong to the caller, because processes and jobs named in them
    are acted upon.

    Its location does not matter: it may have been moved.

    Raises:
        ClusterError: another user wrote them, or could have.
    """
    attempts = [attempt.root for attempt in files.all_attempts()]
    for path in (files.root, files.submitit, files.attempts, *attempts):
        try:
            facts = _facts_at(path, _LOOK)
        except FileNotFoundError:
            continue
        if facts.owner not in (os.getuid(), 0):
            owner = user_of(facts.owner)
            raise ClusterError(
                f"the trial belongs to {owner}, whose records could name any process of yours",
                where=str(path),
                fix=f"ask {owner} to do it",
            )
        _refuse(weakness(facts, uid=os.getuid(), shared=False), path)


def above(top: Path) -> list[tuple[str, bool]]:
    """Returns who could replace the file root through a folder above it; True if that may be any
    user."""
    found = []
    for path in top.resolve().parents:
        try:
            facts = _facts_at(path, _FOLDER)
        except OSError:
            continue
        if facts.owner not in (os.getuid(), 0):
            found.append((f"{path} belongs to {user_of(facts.owner)}, whom you trust", False))
        if facts.open_to and not facts.sticky:
            words = f"{path} can be written by {facts.open_to}"
            found.append((words, facts.open_to == ANYBODY))
    return found


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file that only its owner can read, never through an existing link.

    Raises:
        OSError: it can't be written, or exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


def restrict_umask() -> None:
    """Sets a umask that closes new files of this process and its children to others' writing, and
    leaves the owner all rights."""
    os.umask(os.umask(0o077) & 0o077 | 0o022)


def user_of(uid: int) -> str:
    """Returns the name of a user; ``uid 1234`` if the system knows none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


# ---- the way down ------------------------------------------------------------------------------------


@contextmanager
def _opened(target: Path, *, root: Path, mode: int | None = None) -> Iterator[int]:
    """Opens ``target`` folder by folder, each relative to the one before, so that none is replaced
    between check and use; yields the last descriptor. Without ``mode`` stops at a missing one."""
    top = top_of(root)
    if mode is not None:
        _make_parents(top)
    try:
        fd = os.open(top, _FOLDER)
    except FileNotFoundError:
        yield -1
        return
    path, shared_above = top, False
    try:
        for part in ("", *target.relative_to(top).parts):
            path = path / part
            if part:
                below = _enter(part, fd, path, mode, is_open=shared_above)
                if below < 0:
                    break
                os.close(fd)
                fd = below
            facts = _facts(fd, str(path))
            _refuse(weakness(facts, uid=os.getuid(), shared=_may_be_shared(path, root, top)), path)
            shared_above = bool(facts.open_to)
        yield fd
    finally:
        os.close(fd)


def _make_parents(top: Path) -> None:
    """Creates missing folders above the file root."""
    lacking = [path for path in (top, *top.parents) if not path.exists()]
    for path in reversed(lacking):
        above = os.open(path.parent, _FOLDER)
        try:
            with suppress(FileExistsError):
                _make(path.name, above, READABLE)
        finally:
            os.close(above)


def _may_be_shared(path: Path, root: Path, top: Path) -> bool:
    """Returns whether the folder may be shared: not a user's own folder in a shared root, nor a
    trial's."""
    if root != top:
        return path == top
    return len(path.relative_to(root).parts) < 4


def _enter(part: str, above: int, path: Path, mode: int | None, *, is_open: bool) -> int:
    """Opens ``part`` in the folder ``above``, creating it if ``mode`` is given; -1 if it is
    missing. A link is followed only in a folder that others can't write."""
    for _ in range(3):
        try:
            fd = os.open(part, _LOOK, dir_fd=above)
            break
        except FileNotFoundError:
            if mode is None:
                return -1
            try:
                _make(part, above, mode)
            except FileExistsError:
                continue  # another process was faster: check its folder
    else:
        raise ClusterError(
            f"{path} disappears repeatedly", where=str(path), fix="find out who removes it"
        )
    found = os.fstat(fd)
    if stat.S_ISLNK(found.st_mode) and not is_open and found.st_uid in (os.getuid(), 0):
        os.close(fd)
        try:
            return os.open(part, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            raise ClusterError(
                f"{path} is a link to what is no longer there: {os.readlink(part, dir_fd=above)}",
                where=str(path),
                fix="bring that back; a trial whose code is gone can only be launched anew",
            ) from None
    return fd


def _make(name: str, above: int, mode: int) -> None:
    """Creates a folder with exactly that mode, less what the umask takes from others; the owner has
    all rights."""
    os.mkdir(name, mode, dir_fd=above)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        made = stat.S_IMODE(os.fstat(fd).st_mode)
        if made & 0o700 != 0o700 or made & 0o022:  # an unusual umask, or an inherited ACL
            os.fchmod(fd, (made | 0o700) & ~0o022)
    finally:
        os.close(fd)


def _facts_at(path: Path, flags: int) -> FolderFacts:
    fd = os.open(path, flags)
    try:
        return _facts(fd, str(path))
    finally:
        os.close(fd)


def _facts(fd: int, path: str) -> FolderFacts:
    found = os.fstat(fd)
    kinds = {stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return FolderFacts(
        path=path,
        kind=kinds.get(stat.S_IFMT(found.st_mode), "file"),
        owner=found.st_uid,
        open_to=_open_to(found, fd),
        sticky=bool(found.st_mode & stat.S_ISVTX),
    )


def _open_to(found: os.stat_result, fd: int) -> str:
    if found.st_mode & stat.S_IWOTH:
        return ANYBODY
    if not found.st_mode & stat.S_IWGRP:
        return ""
    if _has_acl(fd):
        return "the users in its access control list (getfacl)"
    if is_private_group(found.st_gid, found.st_uid):
        return ""
    return f"group {_group_of(found.st_gid)}"


def _has_acl(fd: int) -> bool:
    try:
        os.getxattr(f"/proc/self/fd/{fd}", _ACL)
    except OSError:
        return False
    return True


def is_private_group(gid: int, uid: int) -> bool:
    """Returns whether this is the per-user group of many systems: named as the user, with no other
    member."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


def _group_of(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _refuse(found: tuple[str, str], path: Path) -> None:
    what, fix = found
    if what:
        raise ClusterError(what, where=str(path), fix=fix)
