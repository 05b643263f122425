"""The files of a file store: a log with one file per revision, and snapshots of it.

::

    <root>/FORMAT                    marks the folder as a store and names its format
           lock                      held (flock) by the writing process
           log/0000000000000042      the operations of revision 42
           snapshots/0000000000001024  all contents at revision 1024; the last two are kept
           leases/<id>               a counter, bumped in place by the lease's holder
           tmp/                      files being written

For file_store.py. A write is first a complete file and then gets its revision number by link(2), which
succeeds for exactly one process: half a value or half a transaction is never visible, wherever the
writer is killed. Keys are inside the files and never become file names, so no key can escape the
folder. The folders are kept open, and symbolic links in them are never followed. Nothing is fsynced:
the contents are only as durable as the processes that wrote them, and a power cut ends both. This
module does not interpret keys, leases or waiting.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from realsys.api.errors import ConfigError, StoreUnavailable
from realsys.name_resolve.file.folder_changes import OF_THIS_HOST, FolderChanges
from realsys.trial.records import fresh

logger = logging.getLogger(__name__)

FORMAT = b"realsys name-resolution store, layout 1\n"
FOLDERS = ("log", "snapshots", "leases", "tmp")
LOCK_TIMEOUT_S = 10.0
# How long a commit stays in the log after a snapshot contains it: a reader checks only from time to time
# whether the log was truncated behind its position (SURE_S in file_store.py).
KEEP_S = 60.0
NFS = ("nfs", "nfs4")
_PIECE = 1 << 16
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class CommitLog:
    """The open folder of a store. Its owner serialises calls within the process.

    Every call raises StoreUnavailable if the file system refuses.
    """

    def __init__(self, root: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.root, self._lock_timeout_s = root, lock_timeout_s
        self._folders: dict[str, int] = {}
        self._lock_fd, self._lock_pid, self._flock_works = -1, 0, True
        self._counter_fds: dict[str, int] = {}  # of our own leases
        self.file_system, self.changes = "", FolderChanges(-1, "")

    def open(self, empty_snapshot: bytes) -> None:
        """Opens the store; creates it if the folder is empty or missing."""
        try:
            self._open(empty_snapshot)
        except BaseException:
            self.close()
            raise

    def _open(self, empty_snapshot: bytes) -> None:
        with self._reported():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = set(os.listdir(self.root)) - {"FORMAT", "lock", *FOLDERS}
            if foreign:
                raise ConfigError(
                    f"the folder holds other files, e.g. {sorted(foreign)[0]!r}",
                    where=str(self.root),
                    fix="give name resolution an empty folder of its own",
                )
            for name in FOLDERS:
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
                self._folders[name] = os.open(self.root / name, _READ | os.O_DIRECTORY)
            self._folders["."] = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.file_system = file_system_of(self.root)
            self.changes = FolderChanges(self._folders["log"], self.file_system)
            with self.exclusive():
                self._make_once(empty_snapshot)

    def close(self) -> None:
        self.changes.close()
        for fd in (*self._folders.values(), *self._counter_fds.values(), self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._folders, self._counter_fds, self._lock_fd = {}, {}, -1

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the store's lock. The kernel releases it if the holder dies."""
        with self._reported():
            if self._lock_pid != os.getpid():  # a forked child would share its parent's lock
                self._lock_fd = os.open(
                    self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
                self._lock_pid = os.getpid()
            self._acquire()
        try:
            yield
        finally:
            if self._flock_works:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def has_changed(self, known: int) -> bool:
        """Returns whether processes of this host have added revisions after ``known``, or removed
        any, since the last call. Uses inotify and makes no request to the file system."""
        changes = self.changes.take()
        return changes.others or changes.newest > _name(known)

    def has(self, revision: int) -> bool:
        return os.access(_name(revision), os.F_OK, dir_fd=self._folders["log"])

    def read(self, revision: int) -> bytes | None:
        """Reads the commit of ``revision``; None if there is none (yet, or any more)."""
        return self._read("log", _name(revision))

    def append(self, revision: int, commit: bytes) -> bool:
        """Writes ``commit`` as ``revision``; returns False if that revision is taken."""
        with self._reported():
            return self._publish(commit, "log", _name(revision))

    def refresh(self) -> None:
        """Makes the next read of the log bypass the client's cache: see ``fresh`` in
        realsys/trial/records.py."""
        if self.file_system in NFS:
            with self._reported():
                fresh("log", dir_fd=self._folders["."])

    def load_snapshot(self) -> bytes:
        """Reads the older of the retained snapshots, so that the log after it gives watchers a
        history."""
        for _ in range(100):  # another process may remove what was just listed
            with self._reported():
                names = sorted(os.listdir(self._folders["snapshots"]))
                data = self._read("snapshots", names[-2:][0]) if names else None
            if data is not None:
                return data
        raise StoreUnavailable(
            "no snapshot can be read",
            where=str(self.root),
            fix="the folder was damaged or removed: stop the trial and remove it whole",
        )

    def compact(self, revision: int, snapshot: bytes, is_lease: Callable[[str], bool]) -> None:
        """Writes a snapshot and removes what no reader needs. Call it with the lock held.

        Log files are removed in ascending order: file_store.py relies on it to tell "nothing new" from
        "removed".
        """
        with self._reported():
            self._publish(snapshot, "snapshots", _name(revision))
            oldest = self._oldest_needed()
            self._remove("snapshots", lambda name: name < oldest)
            self._remove("log", lambda name: name <= oldest)
            self._remove("leases", lambda name: not is_lease(name))
            if self._flock_works:  # no other process is writing: these are left by killed writers
                self._remove("tmp", lambda name: True)

    def write_counter(self, lease_id: str, counter: int, *, create: bool = False) -> None:
        """Writes a lease's counter in place: readers only compare it, so a torn write does no harm.

        The file stays open for the next renewal. If other hosts read it, the value is on the server when
        this returns (O_SYNC), and opening the file reads it from there.
        """
        with self._reported():
            if lease_id not in self._counter_fds:
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                flags |= 0 if self.file_system in OF_THIS_HOST else os.O_SYNC
                fd = os.open(lease_id, flags, 0o600, dir_fd=self._folders["leases"])
                self._counter_fds[lease_id] = fd
            os.pwrite(self._counter_fds[lease_id], b"%016d" % counter, 0)

    def read_counter(self, lease_id: str) -> bytes | None:
        return self._read("leases", lease_id)

    def counter_time(self, lease_id: str) -> float | None:
        """Returns when the counter was written, by the file system's clock; None if there is none."""
        try:
            return os.stat(lease_id, dir_fd=self._folders["leases"], follow_symlinks=False).st_mtime
        except OSError:
            return None

    def remove_counter(self, lease_id: str) -> None:
        if (fd := self._counter_fds.pop(lease_id, -1)) >= 0:
            os.close(fd)
        self._remove("leases", lambda name: name == lease_id)

    def _make_once(self, empty_snapshot: bytes) -> None:
        path = self.root / "FORMAT"
        if not path.exists():
            self._publish(empty_snapshot, "snapshots", _name(0))
            self._publish(b"", "log", _name(0))
            self._publish(FORMAT, ".", "FORMAT")  # last: now it is a store
        elif (found := path.read_bytes()) != FORMAT:
            raise ConfigError(
                f"the store has the layout {found!r}, this version reads {FORMAT!r}",
                where=str(self.root),
                fix="use another folder, or the version of realsys that made this one",
            )

    def _acquire(self) -> None:
        deadline_s, pause_s = time.monotonic() + self._lock_timeout_s, 0.0001
        while self._flock_works:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise StoreUnavailable(
                        f"another process has held the lock for {self._lock_timeout_s:g} s",
                        where=str(self.root / "lock"),
                        fix="find the holder in /proc/locks (stopped, or on a hung disk?) and end it",
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.005)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                # link(2) still lets one writer win. Lost is the protection of a writer that is stopped
                # between read and link while others write two snapshots' worth of revisions.
                self._flock_works = False
                logger.warning(
                    "lock refused root=%s error=%s fallback=no lock; mount with flock if possible",
                    self.root,
                    error.strerror,
                )

    def _publish(self, data: bytes, folder: str, name: str) -> bool:
        tmp_fd, tmp = self._folders["tmp"], f"{os.getpid()}-{secrets.token_hex(6)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(tmp, flags, 0o600, dir_fd=tmp_fd)
        try:
            try:
                written = os.write(fd, data)
                if written < len(data):
                    raise OSError(errno.ENOSPC, "short write")
            finally:
                os.close(fd)
            os.link(tmp, name, src_dir_fd=tmp_fd, dst_dir_fd=self._folders[folder])
            return True
        except FileExistsError:
            return self._has_two_names(tmp)
        finally:
            os.unlink(tmp, dir_fd=tmp_fd)

    def _has_two_names(self, tmp: str) -> bool:
        """Returns whether the link was made although link(2) reported EEXIST: NFS resends a request
        whose answer was lost. Opening the file asks the server."""
        fd = os.open(tmp, _READ, dir_fd=self._folders["tmp"])
        try:
            return os.fstat(fd).st_nlink == 2
        finally:
            os.close(fd)

    def _oldest_needed(self) -> str:
        """Returns the name of the snapshot from which on everything is kept: at least the older of
        the last two, and one that has existed for ``KEEP_S`` by the file system's clock."""
        names = sorted(os.listdir(self._folders["snapshots"]))
        made_s = [os.stat(n, dir_fd=self._folders["snapshots"]).st_mtime for n in names]
        old = [
            n for n, at_s in zip(names[:-1], made_s, strict=False) if made_s[-1] - at_s >= KEEP_S
        ]
        return old[-1] if old else names[0]

    def _read(self, folder: str, name: str) -> bytes | None:
        try:
            fd = os.open(name, _READ, dir_fd=self._folders[folder])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            pieces = [os.read(fd, _PIECE)]
            while len(pieces[-1]) == _PIECE:  # a shorter read ends the file
                pieces.append(os.read(fd, _PIECE))
            return b"".join(pieces)
        except OSError as error:
            raise self._unavailable(error) from error
        finally:
            os.close(fd)

    def _remove(self, folder: str, is_old: Callable[[str], bool]) -> None:
        for name in sorted(filter(is_old, os.listdir(self._folders[folder]))):
            try:
                os.unlink(name, dir_fd=self._folders[folder])
            except FileNotFoundError:
                pass

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"the file system refused: {error.strerror or error}",
            where=str(self.root),
            fix="check free space, permissions and whether the folder was removed (df, ls -ld)",
        )


def file_system_of(path: Path) -> str:
    """Returns the type of the file system at ``path`` from /proc/self/mountinfo; "" if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, found = "", ""
    resolved = f"{path.resolve()}/"
    for line in lines:
        head, _, tail = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), head.split()[4])
        if resolved.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, found = mount, tail.split()[0]
    return found


def _name(revision: int) -> str:
    return f"{revision:016d}"
