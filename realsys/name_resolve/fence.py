"""Writes that count only while this attempt is the trial's newest.

For everything an attempt shows to the outside: checkpoints, published models, the done mark, progress.
The condition and the write are one transaction, so a process that was cut off or stood still while
another attempt took over can't be believed afterwards, whatever it thinks of itself: the store decides.
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
    """The border between this attempt and all others.

    Args:
        attempt: ours.
        may_have_ended: writes count after our supervisor has ended the attempt as well: words between
            the attempt's jobs, which must all go then. They do not once there is another attempt.
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
        self._revision = 0  # of the attempt key, once it has been seen to be ours

    def write(self, puts: Sequence[Put], *, deletes: Sequence[str] = ()) -> None:
        """All of it, or nothing.

        Raises:
            StaleAttempt: another attempt has taken over.
            StoreUnavailable: the store did not answer; whether it was written is then not known.
        """
        if not self._revision:
            self.check()
        ours = Compare.at_revision(self._keys.attempt, self._revision)
        if not self._store.transaction([ours], puts=puts, deletes=deletes):
            self._revision = 0
            self.check()  # names who took over
            self.write(puts, deletes=deletes)

    def check_patiently(self, *, timeout_s: float) -> None:
        """As ``check``; tries again while the store is away."""
        retry_while_unavailable(
            self.check, timeout_s=timeout_s, what="looking whether the attempt is ours"
        )

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
                fix="nothing: this process must exit, the newer attempt runs the trial",
            )
        if newest.ended_at is not None and not self._may_have_ended:
            raise StaleAttempt(
                f"attempt {newest.number} was ended by its supervisor",
                where=where,
                fix="nothing: this process must exit",
            )
        self._revision = entry.revision
