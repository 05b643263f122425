"""Records what the processes of a trial did, one line per operation, so that fencing can be verified
afterwards.

``attempts/NNNN/history/<type>-<i>.jsonl``, one file per process. tests/support/history_check.py checks
whether a history is consistent with realsys' guarantees; only tests and chaos runs read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from realsys.observability.jsonl import JsonlAppender


class Op(StrEnum):
    """The operation of a row."""

    TOOK_ATTEMPT = "took_attempt"  # supervisor: the store gave it this attempt
    REGISTERED = "registered"  # worker: its key is in the store
    RESUMED = (
        "resumed"  # master: resumes after ``step``; everything later of older attempts is dead
    )
    STEP = "step"  # master: the metrics row of ``step`` is written
    CHECKPOINT = "checkpoint"  # master: the store accepted the recovery checkpoint of ``step``
    SAVE = "save"  # the store accepted a published model
    DONE = "done"  # master: the store accepted that all steps are done
    REFUSED = "refused"  # a fenced write was refused: another attempt runs
    EXITED = "exited"  # a process ended: written by itself or its parent
    LOST = "lost"  # supervisor: declares ``worker`` lost
    RESTARTED = "restarted"  # supervisor: has started ``worker`` again, by itself
    DIED = "died"  # test harness: it killed ``worker`` or its node
    CUT_OFF = "cut_off"  # test harness: it cut ``worker`` off
    HUNG = "hung"  # test harness: it stopped ``worker``


class HistoryLog:
    """Appends the operations of one process.

    Args:
        path: of its own file; created with its folder.
        worker, attempt, token: the writer, in every row unless a row overrides it.
        phase: of the steps; "" for a process that outlives a phase.
        clock: seconds since the epoch.
    Raises:
        ClusterError: the file can't be written (also in ``note``).
    """

    def __init__(
        self,
        path: Path,
        *,
        worker: str,
        attempt: int,
        token: str,
        phase: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._who = {"worker": worker, "attempt": attempt, "token": token, "phase": phase}
        self._clock = clock
        self._file = JsonlAppender(path)

    def note(self, op: Op, *, step: int = 0, **more: Any) -> None:
        """Writes one row atomically.

        Args:
            more: ``began`` = when the operation was sent, for a fenced write: it may have been accepted
                long before the row is written, but never before it was sent.
        """
        self._file.append({"at": self._clock(), "op": str(op), **self._who, "step": step, **more})

    def close(self) -> None:
        self._file.close()


def history_file(folder: Path, worker: str) -> Path:
    """Returns the file of ``model_worker/3`` in an attempt's history folder."""
    return folder / (worker.replace("/", "-") + ".jsonl")
