"""Publishes the run's progress for the live view: running calls, headline numbers, ETA."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from realsys.api.errors import StaleAttempt, StoreError, StoreUnavailable
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.store import Put
from realsys.trial.records import Progress, dumps
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
# Which call runs where changes a dozen times a step, and each write is a file in a store that is a folder:
# a new step is told at once, all else at most so often.
LAZY_S = 1.0
RETRY_S = 1.0
_SMOOTHING = 0.9  # of the step time that the ETA is made from


class ProgressBoard:
    """The ``progress`` key, written by a thread of the master."""

    def __init__(self, runner: WorkerRunner, *, total_steps: int) -> None:
        self._runner, self._total_steps = runner, total_steps
        self._fence = AttemptFence(runner.store, runner.keys, runner.attempt)
        self._running: dict[str, str] = {}
        self._step_s = 0.0
        self.step = 0
        self.epoch = 0
        self.tokens_per_s = 0.0
        self.headline: Mapping[str, float] = {}
        self._newest: Progress | None = None
        self._written: tuple[int, str] | None = None  # step and doing that were written last
        self._closed = False
        self._stale: StaleAttempt | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="progress", daemon=True)
        self._thread.start()

    def call_changed(self, call: str, workers: tuple[str, ...]) -> None:
        """Records that a call began on ``workers``, or ended (no workers)."""
        if workers:
            self._running[call] = ", ".join(workers)
        else:
            self._running.pop(call, None)
        self.publish()

    def step_done(self, step: int, *, epoch: int, seconds: float, tokens_per_s: float) -> None:
        """Counts a step."""
        smooth = self._step_s * _SMOOTHING + seconds * (1 - _SMOOTHING)
        self._step_s = smooth if self._step_s else seconds
        self.step, self.epoch, self.tokens_per_s = step, epoch, tokens_per_s

    def publish(self, doing: str = "") -> None:
        """Writes the key soon, newest value first, without waiting for the store.

        Raises StaleAttempt if another attempt has taken over.
        """
        if self._stale is not None:
            raise self._stale
        left = self._total_steps - self.step
        progress = Progress(
            attempt=self._runner.attempt.number,
            phase=self._runner.phase.name,
            step=self.step,
            total_steps=self._total_steps,
            epoch=self.epoch,
            step_seconds=self._step_s,
            eta_seconds=left * self._step_s if self._step_s else None,
            tokens_per_second=self.tokens_per_s,
            running=dict(self._running),
            headline=dict(self.headline),
            doing=doing,
            updated_at=time.time(),
        )
        with self._changed:
            self._newest = progress
            self._changed.notify_all()

    def close(self) -> None:
        """Writes the last value, if the store accepts it soon, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _is_due(self) -> bool:
        """Returns whether the newest value must be written. Called with ``_changed`` held."""
        newest = self._newest
        return self._closed or (newest is not None and (newest.step, newest.doing) != self._written)

    def _write_all(self) -> None:
        is_away = False
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due, timeout=LAZY_S)
                self._changed.wait_for(lambda: self._closed or self._newest is not None)
                progress, self._newest = self._newest, None
            if progress is None:
                return
            self._written = progress.step, progress.doing
            try:
                self._fence.write([Put(self._runner.keys.progress, dumps(progress))])
                is_away = False
            except StoreUnavailable as error:
                if not is_away:
                    logger.warning("progress waits for the store error=%s", error.what)
                is_away = True
                with self._changed:
                    self._newest = self._newest or progress  # the newest is told when it is back
                    self._changed.wait_for(lambda: self._closed, timeout=RETRY_S)
                    if self._closed:
                        return
            except StoreError as error:  # a store that refuses costs the view, not the run
                logger.warning("progress not published error=%s", error.what)
            except StaleAttempt as error:
                self._stale = error
                return
