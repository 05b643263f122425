"""Publishes how far the run is, for the live view: which call runs where, headline numbers, ETA."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from realsys.api.errors import StoreError
from realsys.api.trial import Progress, dumps
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

_SMOOTHING = 0.9  # of the step time that the ETA is made from


class ProgressBoard:
    """The ``progress`` key, written by the master at every change."""

    def __init__(self, runner: WorkerRunner, *, total_steps: int) -> None:
        self._runner, self._total_steps = runner, total_steps
        self._running: dict[str, str] = {}
        self._step_s = 0.0
        self.step = 0
        self.epoch = 0
        self.tokens_per_s = 0.0
        self.headline: Mapping[str, float] = {}

    def call_changed(self, call: str, workers: tuple[str, ...]) -> None:
        """A call began on ``workers``, or ended (no workers)."""
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
        """Writes the key. A store that refuses costs the view, not the run."""
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
        try:
            self._runner.store.add(self._runner.keys.progress, dumps(progress), replace=True)
        except StoreError as error:
            logger.warning("progress not published error=%s", error.what)
