"""Hears that an attempt is to stop, by name resolution or by a signal, and counts its grace.

The first request stands. One that came by a signal is passed on to the key, from which the master hears of
it, as soon as the store takes it; the grace counts from the signal.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from realsys.api.errors import KeyNotFound, StaleAttempt, StoreError, TrialError
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.store import EventKind, NameResolve, Put, Watch
from realsys.supervisor.health.store_poller import StorePoller
from realsys.trial.records import AttemptRecord, StopRequest, dumps, loads

logger = logging.getLogger(__name__)

POLL_S = 0.25


@dataclass
class StopWatch:
    """Looks from a thread of its own between ``start`` and ``stop``."""

    store: NameResolve
    keys: TrialKeys
    attempt: AttemptRecord
    _by_signal: StopRequest | None = None
    _is_passed_on: bool = False
    _deadline_s: float | None = None
    _watch: Watch | None = None
    _newest: bytes | None = None  # of the key
    _damaged: bytes | None = None  # a request that can't be understood
    asked_by: str = ""  # who wanted the stop, as the request says
    _looks: StorePoller[StopRequest | None] = field(init=False)

    def start(self) -> None:
        self._looks = StorePoller(self._look, every_s=POLL_S, name="stop key").start()

    def stop(self) -> None:
        self._looks.stop()
        if self._watch is not None:
            self._watch.close()

    def request(self, by: str, *, grace_s: float) -> bool:
        """Asks for a stop (from a signal handler: sets, no I/O). False when somebody was first."""
        if self._by_signal is not None or self._deadline_s is not None:
            return False
        self._by_signal = StopRequest(
            grace_seconds=grace_s, by=by, at=time.time(), attempt=self.attempt.number
        )
        return True

    def poll(self) -> None:
        """Takes what was heard; the grace begins to count once."""
        sight = self._looks.take()
        request = self._by_signal or (sight.value if sight is not None else None)
        if self._deadline_s is None and request is not None:
            logger.info("stop requested by=%s grace_s=%g", request.by, request.grace_seconds)
            self._deadline_s = time.monotonic() + request.grace_seconds
            self.asked_by = request.by

    @property
    def is_asked(self) -> bool:
        """Whether a stop was asked, as far as heard."""
        return self._deadline_s is not None

    @property
    def is_over(self) -> bool:
        """Whether the grace is used up."""
        return self._deadline_s is not None and time.monotonic() > self._deadline_s

    def _look(self) -> StopRequest | None:
        """On the looking thread. Raises StoreError."""
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
        except TrialError as error:  # nobody of ours asked that
            if value != self._damaged:
                logger.error("%s; %s", error.what, error.fix)
            self._damaged = value
            return None
        return request if request.attempt == self.attempt.number else None

    def _value(self) -> bytes | None:
        """What the key holds. It is watched: that costs the store nothing while nothing happens."""
        if self._watch is None:
            revision = self.store.revision()
            try:
                self._newest = self.store.get(self.keys.stop).value
            except KeyNotFound:
                self._newest = None
            self._watch = self.store.watch(self.keys.stop, from_revision=revision + 1)
        try:
            for event in self._watch.poll(0.0):
                self._newest = event.value if event.kind is EventKind.PUT else None
        except StoreError:
            self._watch.close()
            self._watch = None
            raise
        return self._newest
