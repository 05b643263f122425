"""Detects stalls from a worker's ticks and step times (pure), for heartbeat_process.py.

Being alive and making progress are different: a process in a deadlock, in an endless loop or
waiting for a missing peer keeps its lease. A worker that reports that it computes and has not
ticked for a little more than two of its usual steps is *stalled*; a worker without steps declares
how often it ticks. A process that was stopped by a signal for as long is stalled too, whatever it
was doing: others wait for its answer. The stall is published, and cleared when it ticks again;
others decide what follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

FLOOR_S = 30.0
FACTOR = 2.2  # a hang is reported, with its stacks, before three steps' time has passed
UNKNOWN_S = 600.0  # every micro-batch and every decoded token ticks
STOPPED_S = 120.0  # limit for a process stopped by a signal, while its step time is unknown
KNOWN_STEPS = 3  # step times needed to know the usual one
KEPT_STEPS = 20
GAP_S = 5.0  # between two checks: if more, this process itself was stopped


@dataclass(kw_only=True)
class StallDetector:
    """Judges one worker. Times are seconds of one monotonic clock.

    Attributes:
        floor_s: lower bound of every limit.
        unknown_s: the limit while the worker's step time is unknown.
    """

    floor_s: float = FLOOR_S
    unknown_s: float = UNKNOWN_S
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _step: int = 0
    _step_began_s: float = 0.0
    _had_pause: bool = False
    _busy: bool = False
    _may_take_s: float = 0.0
    _ticks_within_s: float = 0.0
    _ticks: int = -1
    _moved_s: float = 0.0
    _looked_s: float = 0.0

    def on_status(
        self,
        *,
        busy: bool,
        step: int,
        now_s: float,
        may_take_s: float = 0.0,
        ticks_within_s: float = 0.0,
    ) -> None:
        """Records a status of the worker: whether it computes (``busy``), and in which ``step`` (0:
        none).

        Args:
            may_take_s, ticks_within_s: as in ``heartbeat_messages.Tell``.
        """
        if step > self._step:
            if self._step and not self._had_pause:
                self._steps_s.append((now_s - self._step_began_s) / (step - self._step))
            self._step, self._step_began_s, self._had_pause = step, now_s, False
        self._busy, self._may_take_s, self._moved_s = busy, may_take_s, now_s
        self._ticks_within_s = ticks_within_s

    def paused(self) -> None:
        """Excludes the current step's time from the statistics, because the worker was paused in
        it."""
        self._had_pause = True

    @property
    def limit_s(self) -> float:
        """How long the worker may currently go without a tick."""
        return max(self._usual_s, self._may_take_s)

    @property
    def _usual_s(self) -> float:
        if self._ticks_within_s:
            return max(self.floor_s, self._ticks_within_s)
        usual_s = FACTOR * median(self._steps_s) if self._are_steps_known else self.unknown_s
        return max(self.floor_s, usual_s)

    @property
    def _are_steps_known(self) -> bool:
        return len(self._steps_s) >= KNOWN_STEPS

    @property
    def _stopped_limit_s(self) -> float:
        """Limit for a stopped process, which computes nothing, however slow its first steps may be."""
        known = self._are_steps_known or self._ticks_within_s
        return self._usual_s if known else max(self.floor_s, min(STOPPED_S, self.unknown_s))

    def check(self, ticks: int, *, now_s: float, stopped_s: float = 0.0) -> float:
        """Returns how long the worker has been stalled; 0 if it is not.

        Args:
            stopped_s: how long its process has been found stopped (SIGSTOP) at every check.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if ticks != self._ticks:
            self._ticks, self._moved_s = ticks, now_s
        elif gap_s > GAP_S:  # this process was stopped, and probably the worker too
            self._moved_s += gap_s
        still_s = now_s - self._moved_s
        if self._busy and still_s > self.limit_s:
            return still_s
        return stopped_s if stopped_s > self._stopped_limit_s else 0.0
