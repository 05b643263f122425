"""Receives stop requests, from name resolution or a signal, and measures the grace period.

The first request counts. A request by signal is written to the key, where the master reads it, as soon as
the store accepts it; the grace period counts from the signal.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from realsys.api.errors import StaleAttempt, StoreError, TrialError
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import EventKind, NameResolve, Put, Watch, find
from realsys.supervisor.health.store_poller import StorePoller
from realsys.trial.records import AttemptRecord, StopRequest, dumps, loads

logger = logging.getLogger(__name__)

POLL_S = 0.25


@dataclass
class StopWatch:
    """Polls in a thread of its own between ``start`` and ``stop``."""

    store: NameResolve
    keys: TrialKeys
    attempt: AttemptRecord
    _by_signal: StopRequest | None = None
    _is_passed_on: bool = False
    _deadline_s: float | None = None
    _watch: Watch | None = None
    _newest: bytes | None = None  # of the key
    _damaged: bytes | None = None  # a request that can't be understood
    requested_by: str = ""  # ``by`` of the request
    _poller: StorePoller[StopRequest | None] = field(init=False)

    def start(self) -> None:
        self._poller = StorePoller(self._read_request, every_s=POLL_S, name="stop key").start()

    def stop(self) -> None:
        self._poller.stop()
        if self._watch is not None:
            self._watch.close()

    def request(self, by: str, *, grace_s: float) -> bool:
        """Requests a stop (from a signal handler: no I/O). Returns False if one was requested before."""
        if self._by_signal is not None or self._deadline_s is not None:
            return False
        self._by_signal = StopRequest(
            grace_seconds=grace_s, by=by, at=time.time(), attempt=self.attempt.number
        )
        return True

    def poll(self) -> None:
        """Processes a received request; the grace period starts once."""
        poll = self._poller.latest()
        request = self._by_signal or (poll.value if poll is not None else None)
        if self._deadline_s is None and request is not None:
            logger.info("stop requested by=%s grace_s=%g", request.by, request.grace_seconds)
            self._deadline_s = time.monotonic() + request.grace_seconds
            self.requested_by = request.by

    @property
    def is_requested(self) -> bool:
        """Whether a stop request has been received."""
        return self._deadline_s is not None

    @property
    def is_over(self) -> bool:
        """Whether the grace period is over."""
        return self._deadline_s is not None and time.monotonic() > self._deadline_s

    def _read_request(self) -> StopRequest | None:
        """Reads the key, in the polling thread. Raises StoreError."""
        if self._by_signal is not None and not self._is_passed_on:
            fence = AttemptFence(self.store, self.keys, self.attempt)
            try:
                fence.write([Put(self.keys.stop, dumps(self._by_signal))])
            except StaleAttempt:  # a newer attempt's stop is not ours to write
                logger.warning("stop not passed on: another attempt runs")
            self._is_passed_on = True
        value = self._value()
        if value is None:
            return None
        try:
            request = loads(StopRequest, value, where=self.keys.stop)
        except TrialError as error:  # not written by realsys
            if value != self._damaged:
                logger.error("%s; %s", error.what, error.fix)
            self._damaged = value
            return None
        return request if request.attempt == self.attempt.number else None

    def _value(self) -> bytes | None:
        """Returns the key's value through a watch, which costs the store nothing while nothing changes."""
        if self._watch is None:
            revision = self.store.revision()
            found = find(self.store, self.keys.stop)
            self._newest = found.value if found is not None else None
            self._watch = self.store.watch(self.keys.stop, from_revision=revision + 1)
        try:
            for event in self._watch.poll(0.0):
                self._newest = event.value if event.kind is EventKind.PUT else None
        except StoreError:
            self._watch.close()
            self._watch = None
            raise
        return self._newest
