"""Detects stalled workers and records their stacks. For heartbeat_process.py.

Combines the worker's ticks and statuses (judged by stall.py) with its stacks (stack_dumps.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace

from realsys.heartbeat.bounded import within
from realsys.heartbeat.heartbeat_messages import HeartbeatMemory, StatusUpdate
from realsys.heartbeat.stack_dumps import StackDumps, innermost, state_letter
from realsys.heartbeat.stall import FLOOR_S, StallDetector
from realsys.runtime.lifecycle import WorkerState
from realsys.trial.records import WorkerStatus

logger = logging.getLogger(__name__)

STALL_FLOOR_VARIABLE = "REALSYS_STALL_FLOOR_S"  # for tests, and for sites that need another floor
DUMP_IN_S = 3.0
COLLECT_IN_S = 0.5


class ProgressWatch:
    """Watches the worker ``pid``. ``on_status`` and ``check`` may be called from two threads."""

    def __init__(self, pid: int, pulse: HeartbeatMemory, dumps: StackDumps) -> None:
        self._pid, self._pulse, self._dumps = pid, pulse, dumps
        self._detector = StallDetector(
            floor_s=float(os.environ.get(STALL_FLOOR_VARIABLE) or FLOOR_S)
        )
        self._judging = threading.Lock()
        self._stalled_s, self._where = 0.0, ""
        self._stopped_since_s: float | None = None

    def on_status(self, update: StatusUpdate) -> None:
        """Records a status of the worker, which counts as progress."""
        status = update.status
        with self._judging:
            if status.state == WorkerState.PAUSED:
                self._detector.paused()
            self._detector.on_status(
                busy=status.state == WorkerState.RUNNING,
                step=status.step,
                now_s=time.monotonic(),
                may_take_s=update.may_take_s,
                ticks_within_s=update.ticks_within_s,
            )

    def check(self, now_s: float) -> bool:
        """Checks for a stall, a few times a second. Returns whether the status must be published
        again."""
        if self._dumps.has_new:
            within(COLLECT_IN_S, self._collect_dumps)
        stopped_s = self._stopped_for_s(now_s)
        with self._judging:
            stalled_s = self._detector.check(self._pulse.ticks, now_s=now_s, stopped_s=stopped_s)
            before_s = self._stalled_s
        if stalled_s and not before_s:
            self._where = self._dump_for_status(f"stalled for {stalled_s:.0f} s")
            logger.error("worker stalled seconds=%.0f where=%s", stalled_s, self._where)
        elif before_s and not stalled_s:
            self._where = ""
            logger.warning("worker made progress again")
        self._stalled_s = stalled_s
        return int(stalled_s) != int(before_s)

    def _stopped_for_s(self, now_s: float) -> float:
        if state_letter(self._pid) != "T":
            self._stopped_since_s = None
            return 0.0
        if self._stopped_since_s is None:
            self._stopped_since_s = now_s
        return now_s - self._stopped_since_s

    def completed(self, status: WorkerStatus) -> WorkerStatus:
        """Returns the status completed with the findings of this watch."""
        stalled_s = round(self._stalled_s, 1)
        return replace(status, stalled_s=stalled_s, stalled_where=self._where)

    def _dump_for_status(self, why: str) -> str:
        found: list[str] = []
        within(DUMP_IN_S, lambda: found.append(self.dump(why)))
        return found[0] if found else "its stacks could not be written"

    def dump(self, why: str) -> str:
        """Dumps the worker's stacks; returns where its main thread is, in a short text."""
        if state_letter(self._pid) == "T":
            return "stopped by SIGSTOP"
        try:
            text = self._dumps.ask(self._pid, why)
        except OSError as error:
            logger.warning("stacks not dumped error=%s", error)
            return ""
        if not text and state_letter(self._pid) == "D":
            return "waits for a device or a file system (state D)"
        return innermost(text) if text else "does not react to signals"

    def _collect_dumps(self) -> None:
        try:
            self._dumps.collect()
        except OSError as error:
            logger.warning("stacks not written error=%s", error)
