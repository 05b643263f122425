"""The store of an attempt from its supervisor's side: the site's, or an etcd that it starts for itself.

For main.py. A job's own etcd lives on the supervisor's node, on its local disk, and ends with it; how to
enter it is written into the attempt's folder for everybody else.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.api.errors import StoreUnavailable
from realsys.api.plan import LaunchPlan
from realsys.api.trial import AttemptFiles
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import NameResolve
from realsys.name_resolve.trial_store import has_job_etcd, open_trial_store
from realsys.worker.network import listening_address

if TYPE_CHECKING:
    from realsys.supervisor.private_etcd import PrivateEtcd

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


@dataclass
class JobStore:
    """The open store, and the server behind it where it is ours."""

    store: NameResolve
    server: PrivateEtcd | None = None
    _folder: Path | None = None

    @classmethod
    def open(cls, plan: LaunchPlan, nodes: str) -> JobStore:
        """Opens the store, after starting it if it is the job's own.

        Raises:
            ClusterError: etcd is not installed here or does not start.
            StoreUnavailable: the site's does not answer.
        """
        if not has_job_etcd(plan):
            return cls(open_trial_store(plan, None))
        from realsys.supervisor.private_etcd import PrivateEtcd

        folder = Path(
            tempfile.mkdtemp(prefix="realsys-etcd-")
        )  # local disk: etcd must not sit on NFS
        try:
            server = PrivateEtcd.start(
                folder, host=listening_address(plan.cluster, nodes), timeout_s=START_TIMEOUT_S
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        url = "etcd://" + ",".join(server.access.endpoints)
        logger.info("own etcd started endpoints=%s folder=%s", url, folder)
        return cls(open_store(url, access=server.access), server, folder)

    def tell(self, attempt: AttemptFiles) -> None:
        """Writes down how to enter it, for the attempt's workers and for status."""
        if self.server is not None:
            self.server.access.to_file(attempt.etcd_access)

    def close(self) -> None:
        """Closes the store and ends the server."""
        self.store.close()
        if self.server is not None:
            self.server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


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
