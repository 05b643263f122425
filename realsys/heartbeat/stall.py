"""Does a worker get on? Judged from its ticks and its steps (pure), for heartbeat_process.py.

Alive and getting on are two things: a process in a deadlock, in an endless loop or waiting for a peer
that never comes keeps its lease. A worker that says it computes and has not ticked for longer than two
of its usual steps and a little is *stalled*; one that has no steps says how often it ticks. So is one
that somebody has stopped for so long, whatever it was at: others wait for its answer. That is
published, and taken back when it ticks again; what follows from it is for others to decide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

FLOOR_S = 30.0
FACTOR = 2.2  # so that a hang is seen, with its stacks, before three steps' time is over
UNKNOWN_S = 600.0  # every micro-batch and every decoded token ticks
STOPPED_S = 120.0  # of a process that somebody has stopped, while its steps are not known
KNOWN_STEPS = 3  # before so many step times are known, nothing is usual
KEPT_STEPS = 20
GAP_S = 5.0  # between two looks: more, and it was we who stood still


@dataclass(kw_only=True)
class StallJudge:
    """Judges one worker. Times are seconds of one monotonic clock.

    Attributes:
        floor_s: never stalled before that.
        unknown_s: the limit while the worker's steps are not known yet.
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

    def told(
        self,
        *,
        busy: bool,
        step: int,
        now_s: float,
        may_take_s: float = 0.0,
        ticks_within_s: float = 0.0,
    ) -> None:
        """The worker told its status: that it computes (``busy``) in ``step`` (0: none).

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
        """The time of this step is no measure: the worker was paused in it."""
        self._had_pause = True

    @property
    def limit_s(self) -> float:
        """How long it may go without a tick, as things are."""
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
        """A process that is stopped computes nothing, however slow its first steps may be."""
        known = self._are_steps_known or self._ticks_within_s
        return self._usual_s if known else max(self.floor_s, min(STOPPED_S, self.unknown_s))

    def look(self, ticks: int, *, now_s: float, stopped_s: float = 0.0) -> float:
        """How long the worker has been stalled for; 0 when it is not.

        Args:
            stopped_s: for how long its process has been seen stopped (SIGSTOP), at every look.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if ticks != self._ticks:
            self._ticks, self._moved_s = ticks, now_s
        elif gap_s > GAP_S:  # we were stopped, and so was the worker for all we know
            self._moved_s += gap_s
        still_s = now_s - self._moved_s
        if self._busy and still_s > self.limit_s:
            return still_s
        return stopped_s if stopped_s > self._stopped_limit_s else 0.0
