"""Opens the store of an attempt for its supervisor: the site's, or an etcd that it starts itself.

For supervisor_main.py. A job's own etcd runs on the supervisor's node, on its local disk, and ends with
it; its access file is written into the attempt's folder for all other processes.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from realsys.api.errors import StoreUnavailable
from realsys.api.plan import LaunchPlan
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.expiry import endings, warning_of
from realsys.name_resolve.file.commit_log import file_system_of
from realsys.name_resolve.open import open_store
from realsys.name_resolve.retry import retry_while_unavailable
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import has_job_etcd, open_trial_store
from realsys.runtime.background_thread import BackgroundThread
from realsys.trial.records import AttemptFiles
from realsys.worker.network import external_address, ports, raise_open_file_limit

if TYPE_CHECKING:
    from realsys.supervisor.job_etcd.private_etcd import PrivateEtcd

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
PREFIX = "realsys-etcd-"
NEW_S = 60.0
# Between two starts of a server that keeps ending; reset once it has run for a minute.
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 0.5, 30.0, 60.0
# etcd syncs each write and locks its files: it must not sit on what other hosts share.
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.")


@dataclass
class JobStore:
    """The open store, and its server if that is the job's own."""

    store: NameResolve
    server: PrivateEtcd | None = None
    certificates: CertificateWatch | None = None
    _folder: Path | None = None
    _lock_fd: int = -1  # of the folder: marks it as in use for other supervisors
    _pause_s: float = 0.0  # after the last start of our server
    _next_start_s: float = float("-inf")

    @classmethod
    def open(cls, plan: LaunchPlan, nodes: str, *, was_open_before: bool = False) -> JobStore:
        """Opens the store; starts it first if it is the job's own.

        Args:
            was_open_before: by an earlier attempt: if it does not answer, or refuses the login, wait as
                long as during a run. Otherwise the configuration is probably wrong.
        Raises:
            ClusterError: etcd is not installed here or does not start.
            StoreUnavailable: the site's store does not answer, or refuses the login.
        """
        if not has_job_etcd(plan):
            patience_s = float(plan.cluster.store_patience_seconds)
            store = retry_while_unavailable(
                lambda: open_trial_store(plan, None),
                timeout_s=patience_s if was_open_before else START_TIMEOUT_S,
                what="opening the store",
                when_denied=was_open_before,
            )
            return cls(store, certificates=_watch_certificates(plan))
        from realsys.supervisor.job_etcd.private_etcd import PrivateEtcd

        place = _local_place()
        _remove_left_over(place)
        raise_open_file_limit()  # Slurm passes on the submitting shell's limit
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        try:
            server = PrivateEtcd.start(
                folder,
                host=external_address(plan.cluster, nodes),
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
        return cls(store, server, _folder=folder, _lock_fd=lock_fd)

    def write_access(self, attempt: AttemptFiles) -> None:
        """Writes the access file, for the attempt's workers and for status."""
        if self.server is not None:
            self.server.access.to_file(attempt.etcd_access)

    def look_after(self) -> None:
        """Restarts our server if it has ended: Slurm's signals may reach every process of a job. Its data
        are kept, and leases start again. Call it from the main thread, because the server ends with the
        starting thread. A server that keeps ending (a full disk, its port taken) is restarted at
        increasing intervals; the run continues without it as long as without any store."""
        now_s = time.monotonic()
        if self.server is None or now_s < self._next_start_s:
            return
        if (code := self.server.poll()) is None:
            return
        soon = now_s - self._next_start_s < STEADY_S
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if soon else FIRST_PAUSE_S
        self._next_start_s = now_s + self._pause_s
        log = self.server.log_tail(3)
        logger.error("own etcd ended, restarting code=%d log:\n%s", code, log)
        self.server.restart()

    def close(self) -> None:
        """Closes the store and ends the server."""
        if self.certificates is not None:
            self.certificates.stop()
        self.store.close()
        if self.server is not None:
            self.server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_fd)


def _watch_certificates(plan: LaunchPlan) -> CertificateWatch | None:
    """Watches the certificates of the site's etcd, if it uses TLS."""
    if not plan.name_resolve_url.startswith("etcd://"):
        return None
    from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of

    access = EtcdAccess.from_spec(endpoints_of(plan.name_resolve_url), plan.cluster.etcd)
    return CertificateWatch(access).start() if access.is_encrypted else None


def _local_place() -> Path:
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    local = [p for p in places if p.is_dir() and not file_system_of(p).startswith(_SHARED)]
    return (local or places)[0]


def _remove_left_over(place: Path) -> None:
    """Removes folders of our killed supervisors: the kernel has released their locks. A pid would not do,
    because a container with the same /tmp has other pids."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process removes it too, or it is not ours, or in use
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
    """Returns a function that opens the store of an earlier attempt's workers; it returns None if that
    store ended with its job."""

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


# ---- Warns before certificates of a site's etcd expire. For job_store.py.


LOOK_EVERY_S = 3600.0


class CertificateWatch:
    """Logs warnings before a certificate of the run's etcd expires: a week before, a day before, and at
    expiry. Runs in a thread of its own, and reads the servers' certificates too.

    Args:
        access: reread from its files for each check: a certificate may be renewed in the meantime.
    """

    def __init__(self, access: EtcdAccess, *, every_s: float = LOOK_EVERY_S) -> None:
        self._access, self._every_s = access, every_s
        self._warned: dict[str, int] = {}  # certificate → urgency of the last warning
        self._thread = BackgroundThread(self._run, name="certificates")

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its current check, without waiting for it."""
        self._thread.stop(wait_s=0.0)

    def check(self, now: datetime.datetime) -> None:
        """Checks once. A renewed certificate is warned of again before its own expiry."""
        for ending in endings(self._access.reread()):
            urgency, text = warning_of(ending, now)
            if urgency > self._warned.get(ending.what, 0):
                logger.log(logging.WARNING if urgency == 1 else logging.ERROR, "%s", text)
            self._warned[ending.what] = urgency

    def _run(self) -> None:
        while not self._thread.is_ending:
            try:
                self.check(datetime.datetime.now(datetime.UTC))
            except Exception:  # outermost frame: what only warns must not end anything
                logger.exception("certificate check failed")
            self._thread.pause(self._every_s)
