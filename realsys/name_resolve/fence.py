"""Writes that take effect only while this attempt is the trial's newest.

For everything an attempt publishes: checkpoints, models, the done mark, progress. The condition and
the write are one transaction, so a process that was cut off or stopped while another attempt took
over can't publish afterwards: the store decides, not the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from realsys.api.errors import KeyNotFound, StaleAttempt
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.retry import retry_while_unavailable
from realsys.name_resolve.store import Compare, NameResolve, Put
from realsys.trial.records import AttemptRecord, loads

logger = logging.getLogger(__name__)


class AttemptFence:
    """Rejects writes of any attempt but the current one.

    Args:
        attempt: ours.
        may_have_ended: accept writes after our supervisor has ended the attempt, for messages between
            the attempt's jobs during shutdown. They are rejected once another attempt has begun.
    """

    def __init__(
        self,
        store: NameResolve,
        keys: TrialKeys,
        attempt: AttemptRecord,
        *,
        may_have_ended: bool = False,
    ) -> None:
        self._store, self._keys, self._attempt = store, keys, attempt
        self._may_have_ended = may_have_ended
        self._revision = 0  # of the attempt key, once it has been checked to be ours

    def write(self, puts: Sequence[Put], *, deletes: Sequence[str] = ()) -> None:
        """Applies all puts and deletes, or none.

        Raises:
            StaleAttempt: another attempt has taken over.
            StoreUnavailable: the store did not answer; it is unknown whether it was written.
        """
        if not self._revision:
            self.check()
        ours = Compare.at_revision(self._keys.attempt, self._revision)
        if not self._store.transaction([ours], puts=puts, deletes=deletes):
            self._revision = 0
            self.check()  # raises, naming the newer attempt
            self.write(puts, deletes=deletes)

    def check_with_retry(self, *, timeout_s: float) -> None:
        """As ``check``, but retries while the store is unavailable."""
        retry_while_unavailable(self.check, timeout_s=timeout_s, what="checking the attempt")

    def check(self) -> None:
        """Raises StaleAttempt if another attempt has taken over."""
        where = f"trial {self._keys.experiment}/{self._keys.trial}"
        try:
            entry = self._store.get(self._keys.attempt)
        except KeyNotFound:
            raise StaleAttempt(
                f"the store knows no attempt, we are {self._attempt.number}",
                where=where,
                fix="the trial was cleared while it ran: this process must exit",
            ) from None
        newest = loads(AttemptRecord, entry.value, where=self._keys.attempt)
        if (newest.number, newest.token) != (self._attempt.number, self._attempt.token):
            raise StaleAttempt(
                f"attempt {newest.number} on {newest.host} has taken over, "
                f"we are attempt {self._attempt.number}",
                where=where,
                fix="none: this process must exit, the newer attempt runs the trial",
            )
        if newest.ended_at is not None and not self._may_have_ended:
            raise StaleAttempt(
                f"attempt {newest.number} was ended by its supervisor",
                where=where,
                fix="none: this process must exit",
            )
        self._revision = entry.revision
