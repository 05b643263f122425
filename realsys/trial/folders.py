"""Folders that nobody else can replace or write into: how they are made, and what is checked of them.

Whoever can write a trial's folder, or exchange one that it lies in, decides what its owner's processes
run. So from the file root down each folder must be its user's (or the superuser's) and closed to others'
writing. One that others may write into, as a root that users share, passes if it is sticky (others can't
remove or rename what is ours in it) and is not the trial's own. Used by launches, by a job's first
process and by `realsys doctor`. What lies above the file root is its user's to judge. Nothing here reads a
file of a trial.

A root that is shared holds a folder for each user, ``<root>/realsys-<user>``, and that is the file root of
all that user's plans (``own_root``): nobody's folder lies in a colleague's.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from realsys.api.errors import ClusterError
from realsys.trial.records import TrialFiles

READABLE, PRIVATE = 0o755, 0o700  # others may read, as far as the umask lets them; nobody else
OWN_PREFIX = "realsys-"
ANYBODY = "anybody"
_ACL = "system.posix_acl_access"
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """What is known of something on the way to a trial.

    Attributes:
        kind: folder, link or file.
        owner: uid.
        open_to: who else may write there, in words; empty: nobody.
        sticky: others can't remove or rename what is not theirs in it.
    """

    path: str
    kind: str
    owner: int
    open_to: str
    sticky: bool


def weakness(facts: FolderFacts, *, uid: int, shared: bool) -> tuple[str, str]:
    """What lets another user exchange what lies in the folder, and what to do; empty: nothing (pure).

    Args:
        uid: whose trial it is about.
        shared: whether others may put their own things there, beside ours.
    """
    path = facts.path
    if facts.kind != "folder":
        whose = "of yours" if facts.owner == uid else f"that belongs to {user_of(facts.owner)}"
        return f"{path} is no folder but a {facts.kind} {whose}", _elsewhere(
            "find out who put it there"
        )
    if facts.owner not in (uid, 0):
        return (
            f"{path} belongs to {user_of(facts.owner)}, who could exchange what you have in it",
            _elsewhere(
                "if it is to be shared, an administrator must own it: chown root, chmod 1777"
            ),
        )
    if not facts.open_to or (facts.sticky and shared):
        return "", ""
    verb = "chmod +t" if shared else "chmod go-w"
    who = "run" if facts.owner == uid else f"ask {user_of(facts.owner)} for"
    return (
        f"{path} can be written by {facts.open_to}, who could exchange what you have in it",
        _elsewhere(f"{who}: {verb} {shlex.quote(path)}"),
    )


def _elsewhere(first: str) -> str:
    return f"{first}; or set REALSYS_FILE_ROOT to a folder that only you can write"


def own_root(root: str, user: str) -> str:
    """Where a user's files are under ``root``: in itself, or in a folder of his own if it is shared."""
    try:
        found = os.stat(root)
    except OSError:
        return root
    return os.path.join(root, OWN_PREFIX + user) if is_shared(found, os.getuid()) else root


def is_shared(found: os.stat_result, uid: int) -> bool:
    """Somebody else's folder, or one that is open to others on purpose: sticky (pure)."""
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid != uid or bool(others_write and found.st_mode & stat.S_ISVTX)


def root_of(trial: Path) -> Path:
    """The file root of ``<root>/runs/<user>/<experiment>/<trial>``."""
    return trial.parents[min(3, len(trial.parents) - 1)]


def top_of(root: Path) -> Path:
    """The topmost folder to be checked: a shared root, where ``root`` is a user's own folder in it."""
    return root.parent if root.name.startswith(OWN_PREFIX) else root


def check_folders(target: Path, *, root: Path) -> None:
    """Checks every folder from the file root down to ``target``, as far as they are there.

    Raises:
        ClusterError: another user could exchange one of them.
    """
    with _way(target, root=root):
        pass


def make_folders(target: Path, *, root: Path, mode: int = READABLE) -> None:
    """The same, and makes those that lack, whatever the umask closed to others' writing.

    Raises:
        ClusterError: as above. OSError: the file system refuses.
    """
    with _way(target, root=root, mode=mode):
        pass


def make_trial_folder(files: TrialFiles, *, root: Path) -> None:
    """Makes a new trial's folder with its private parts, and those on the way to it from the file root.

    Raises:
        FileExistsError: there is one. ClusterError: another user could exchange one on the way to it.
    """
    with _way(files.root.parent, root=root, mode=READABLE) as parent:
        _make(files.root.name, parent, READABLE)
    with _way(files.root, root=root) as folder:
        for private in (files.secrets, files.submitit):
            _make(private.name, folder, PRIVATE)


def check_trial(files: TrialFiles) -> None:
    """Checks a trial's folder, those on the way to it and those in it that decide what runs.

    Where its file root is is told by where it lies, not by its plan: that one is not trusted yet.

    Raises:
        ClusterError: another user could exchange one, or could have.
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
    """Checks that a trial's records are its caller's: what they say of processes and jobs is acted upon.

    Where it lies does not matter: it may have been moved.

    Raises:
        ClusterError: another user wrote them, or could have.
    """
    attempts = [attempt.root for attempt in files.all_attempts()]
    for path in (files.root, files.submitit, files.attempts, *attempts):
        try:
            fd = os.open(path, _LOOK)
        except FileNotFoundError:
            continue
        try:
            facts = _facts(fd, str(path))
        finally:
            os.close(fd)
        if facts.owner not in (os.getuid(), 0):
            whose = user_of(facts.owner)
            raise ClusterError(
                f"that is a trial of {whose}, whose records could name any process of yours",
                where=str(path),
                fix=f"let {whose} do it",
            )
        _refuse(weakness(facts, uid=os.getuid(), shared=False), path)


def above(top: Path) -> list[tuple[str, bool]]:
    """Who, through a folder above the file root, could exchange it; True where that may be anybody."""
    found = []
    for path in top.resolve().parents:
        try:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            facts = _facts(fd, str(path))
        finally:
            os.close(fd)
        if facts.owner not in (os.getuid(), 0):
            found.append((f"{path} belongs to {user_of(facts.owner)}, whom you trust", False))
        if facts.open_to and not facts.sticky:
            words = f"{path} can be written by {facts.open_to}"
            found.append((words, facts.open_to == ANYBODY))
    return found


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file that its owner alone can read, never through a link that somebody put there.

    Raises:
        OSError: it can't be written; it is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


def let_nobody_else_write() -> None:
    """From now on what this process and its children make is closed to others' writing; an odd umask takes
    nothing from its owner."""
    os.umask(os.umask(0o077) & 0o077 | 0o022)


def user_of(uid: int) -> str:
    """Name of a user; ``uid 1234`` where the system knows none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


# ---- the way down ------------------------------------------------------------------------------------


@contextmanager
def _way(target: Path, *, root: Path, mode: int | None = None) -> Iterator[int]:
    """Goes down to ``target`` folder by folder, each opened in the one before, so that none is exchanged
    between look and use; gives the last one's descriptor. Without ``mode`` ends where one lacks."""
    top = top_of(root)
    if mode is not None:
        _make_way_to(top)
    try:
        fd = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield -1
        return
    path, shared_above = top, False
    try:
        for part in ("", *target.relative_to(top).parts):
            path = path / part
            if part:
                below = _step(part, fd, path, mode, is_open=shared_above)
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


def _make_way_to(top: Path) -> None:
    """The folders above, where they lack; theirs who made them."""
    lacking = [path for path in (top, *top.parents) if not path.exists()]
    for path in reversed(lacking):
        above = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(FileExistsError):
                _make(path.name, above, READABLE)
        finally:
            os.close(above)


def _may_be_shared(path: Path, root: Path, top: Path) -> bool:
    """Not the user's own folder in a shared root, nor a trial's: there nobody else has business."""
    if root != top:
        return path == top
    return len(path.relative_to(root).parts) < 4


def _step(part: str, above: int, path: Path, mode: int | None, *, is_open: bool) -> int:
    """Descriptor of ``part`` in the folder ``above``, made if it lacks; -1 if it lacks and is not to be
    made. A link counts only where nobody else can have put it: in a folder that others can't write."""
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
                continue  # somebody else was quicker: it is looked at all the same
    else:
        raise ClusterError(f"{path} comes and goes", where=str(path), fix="find out who removes it")
    found = os.fstat(fd)
    if stat.S_ISLNK(found.st_mode) and not is_open and found.st_uid in (os.getuid(), 0):
        os.close(fd)
        return os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    return fd


def _make(name: str, above: int, mode: int) -> None:
    """A folder of just that mode, less what the umask takes from others; its owner has all rights."""
    os.mkdir(name, mode, dir_fd=above)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        made = stat.S_IMODE(os.fstat(fd).st_mode)
        if made & 0o700 != 0o700 or made & 0o022:  # an odd umask, or an ACL that is inherited
            os.fchmod(fd, (made | 0o700) & ~0o022)
    finally:
        os.close(fd)


def _facts(fd: int, path: str) -> FolderFacts:
    found = os.fstat(fd)
    kinds: Sequence[tuple[Callable[[int], bool], str]] = (
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "link"),
    )
    kind = next((name for test, name in kinds if test(found.st_mode)), "file")
    return FolderFacts(
        path=path,
        kind=kind,
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
        return "those whom its access control list names (getfacl)"
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
    """The group that many systems give each user: his name, and nobody else in it."""
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
