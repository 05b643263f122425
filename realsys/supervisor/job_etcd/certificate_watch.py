"""Certificates of a site's etcd that are about to end: people hear of it before. For job_store.py."""

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
    """Warns in the log when a certificate that the run's etcd is entered with is about to end: a week
    before, a day before, and when it has. From a thread of its own, which asks the servers too.

    Args:
        access: read anew from its files for each look: a certificate may be renewed in the meantime.
    """

    def __init__(self, access: EtcdAccess, *, every_s: float = LOOK_EVERY_S) -> None:
        self._access, self._every_s = access, every_s
        self._told: dict[str, int] = {}  # certificate → how urgent it was when it was told last
        self._thread = BackgroundThread(self._run, name="certificates")

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its look; does not wait for it."""
        self._thread.stop(wait_s=0.0)

    def look(self, now: datetime.datetime) -> None:
        """Looks once. A certificate that was renewed is told again when its time comes."""
        for ending in endings(self._access.reread()):
            urgency, text = warning_of(ending, now)
            if urgency > self._told.get(ending.what, 0):
                logger.log(logging.WARNING if urgency == 1 else logging.ERROR, "%s", text)
            self._told[ending.what] = urgency

    def _run(self) -> None:
        while not self._thread.is_ending:
            try:
                self.look(datetime.datetime.now(datetime.UTC))
            except Exception:  # outermost frame: what only warns must not end anything
                logger.exception("certificates not looked at")
            self._thread.pause(self._every_s)
