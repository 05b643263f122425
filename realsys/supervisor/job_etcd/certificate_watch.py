"""Warns before certificates of a site's etcd expire. For job_store.py."""

from __future__ import annotations

import datetime
import logging
from typing import Self

from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.expiry import endings, warning_of
from realsys.runtime.background_thread import BackgroundThread

LOOK_EVERY_S = 3600.0

logger = logging.getLogger(__name__)


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
