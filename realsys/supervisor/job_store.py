"""The store of an attempt from its supervisor's side: the site's, or an etcd that it starts for itself.

For main.py. A job's own etcd lives on the supervisor's node, on its local disk, and ends with it; how to
enter it is written into the attempt's folder for everybody else.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.api.errors import StoreUnavailable
from realsys.api.plan import LaunchPlan
from realsys.api.trial import AttemptFiles
from realsys.name_resolve.commit_log import file_system_of
from realsys.name_resolve.open import open_store
from realsys.name_resolve.patience import patiently
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import has_job_etcd, open_trial_store
from realsys.worker.network import listening_address, ports

if TYPE_CHECKING:
    from realsys.supervisor.private_etcd import PrivateEtcd

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
PREFIX = "realsys-etcd-"
NEW_S = 60.0
RESTARTS, WITHIN_S = 5, 60.0  # of our server: more in that time do not help it
FIRST_PAUSE_S = 0.5
# etcd syncs each write and locks its files: it must not sit on what other hosts share.
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.")


@dataclass
class JobStore:
    """The open store, and the server behind it where it is ours."""

    store: NameResolve
    server: PrivateEtcd | None = None
    _folder: Path | None = None
    _lock_fd: int = -1  # of the folder: says to other supervisors that it is in use
    _restarted_s: list[float] = field(default_factory=list)

    @classmethod
    def open(cls, plan: LaunchPlan, nodes: str) -> JobStore:
        """Opens the store, after starting it if it is the job's own.

        Raises:
            ClusterError: etcd is not installed here or does not start.
            StoreUnavailable: the site's does not answer.
        """
        if not has_job_etcd(plan):
            store = patiently(
                lambda: open_trial_store(plan, None), timeout_s=START_TIMEOUT_S, what="opening it"
            )
            return cls(store)
        from realsys.supervisor.private_etcd import PrivateEtcd

        place = _local_place()
        _remove_left_over(place)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        try:
            server = PrivateEtcd.start(
                folder,
                host=listening_address(plan.cluster, nodes),
                timeout_s=START_TIMEOUT_S,
                ports=ports(plan.cluster),
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            store = open_store(server.url, access=server.access)
        except BaseException:
            server.stop()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        logger.info("own etcd started at=%s folder=%s", server.url, folder)
        return cls(store, server, folder, lock_fd)

    def tell(self, attempt: AttemptFiles) -> None:
        """Writes down how to enter it, for the attempt's workers and for status."""
        if self.server is not None:
            self.server.access.to_file(attempt.etcd_access)

    def look_after(self) -> None:
        """Starts our server again if it has ended: Slurm's signals may reach every process of a job.
        Its data stay, and leases begin anew. From the main thread, with which the server dies.

        Raises:
            ClusterError: it has ended too often; says what it said last.
        """
        if self.server is None or (code := self.server.poll()) is None:
            return
        now_s = time.monotonic()
        pause_s = pause_before_restart(self._restarted_s, now_s)
        if pause_s is None:
            what = f"etcd ended {RESTARTS + 1} times in {WITHIN_S:g} s, last with status {code}"
            raise self.server.failure(what)
        if pause_s <= 0:
            logger.warning("own etcd ended code=%d; starting it again", code)
            self._restarted_s.append(now_s)
            self.server.restart()

    def close(self) -> None:
        """Closes the store and ends the server."""
        self.store.close()
        if self.server is not None:
            self.server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_fd)


def pause_before_restart(restarted_s: Sequence[float], now_s: float) -> float | None:
    """How long to wait before a server that has ended is started again, twice as long each time; None
    when it was tried often enough. Times are of one clock, oldest first. Pure."""
    recent = [at_s for at_s in restarted_s if now_s - at_s < WITHIN_S]
    if len(recent) >= RESTARTS:
        return None
    if not recent:
        return 0.0
    return float(recent[-1] + FIRST_PAUSE_S * 2 ** len(recent) - now_s)


def _local_place() -> Path:
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    local = [p for p in places if p.is_dir() and not file_system_of(p).startswith(_SHARED)]
    return (local or places)[0]


def _remove_left_over(place: Path) -> None:
    """Folders of supervisors of ours that were killed: the kernel has freed their locks. A pid would not
    do, since a container with the same /tmp has other ones."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another one tidies up too, or it is not ours, or it is in use
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                is_new = time.time() - found.st_mtime < NEW_S  # and perhaps not locked yet
                if found.st_uid == os.geteuid() and not is_new:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def former_store(
    plan: LaunchPlan, store: NameResolve
) -> Callable[[AttemptFiles], NameResolve | None]:
    """The store that an earlier attempt's workers registered in; None when it is gone with that job."""

    def find(attempt: AttemptFiles) -> NameResolve | None:
        if not has_job_etcd(plan):
            return store
        try:
            found = open_trial_store(plan, attempt)
            found.revision()
        except StoreUnavailable:
            return None
        return found

    return find
