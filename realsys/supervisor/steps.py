"""Starts a phase's workers and ends them: the one thing that differs between a laptop and Slurm.

A ``Task`` is one worker process as the supervisor sees it. ``LocalSteps`` starts plain child
processes; each ties its life to ours (realsys/worker/parent.py), so that none outlives a supervisor
that was killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from realsys.worker.parent import PARENT_PID_VARIABLE

logger = logging.getLogger(__name__)


@dataclass
class Task:
    """One worker process."""

    worker: str  # model_worker/3
    process: subprocess.Popen[bytes]
    started_at: float
    ended_at: float | None = None

    def poll(self) -> int | None:
        """Return code, or None while it runs; notes the moment it was seen to end."""
        code = self.process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.time()
        return code


class LocalSteps:
    """Worker processes on this machine."""

    def __init__(self, *, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    def start(self, worker: str, argv: list[str], log: Path) -> Task:
        """Starts one worker with its output appended to ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **self._environment,
            PARENT_PID_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        logger.info("worker started worker=%s pid=%d", worker, process.pid)
        return Task(worker, process, time.time())

    def end(self, tasks: Iterable[Task], *, grace_s: float) -> None:
        """Ends what still runs: SIGTERM, after ``grace_s`` SIGKILL. Returns when all are gone."""
        left = [t for t in tasks if t.poll() is None]
        for task in left:
            task.process.terminate()
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            left = [t for t in left if t.poll() is None]
            time.sleep(0.02)
        for task in left:
            logger.warning("worker killed worker=%s after_s=%g", task.worker, grace_s)
            task.process.kill()
        for task in left:
            task.process.wait()  # SIGKILL: the kernel ends it; no deadline can help otherwise
            task.poll()
