"""What the master shows to the world: models, checkpoints, the done mark; each by a fenced write first.

The store says whether our attempt is still the newest, in the same transaction that notes the
publication. Only then is anything renamed to where others look for it. While the store is away a
publication waits: an outage of some seconds costs that time and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from realsys.api.errors import StaleAttempt
from realsys.api.trial import write_record
from realsys.master.recover import write_resumed
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.store import Put
from realsys.observability.history import HistoryLog, Op, history_file
from realsys.worker.runner import WorkerRunner

PUBLISH_TIMEOUT_S = 900.0


class Publisher:
    """Publishes for one attempt of one phase."""

    def __init__(self, runner: WorkerRunner) -> None:
        self._runner, self._keys = runner, runner.keys
        self._fence = AttemptFence(runner.store, runner.keys, runner.attempt)
        self._history = HistoryLog(
            history_file(runner.attempt_files.history, runner.name),
            worker=runner.name,
            attempt=runner.attempt.number,
            token=runner.attempt.token,
        )

    def close(self) -> None:
        """Closes the history."""
        self._history.close()

    def allow_step(self, step: int) -> None:
        """Before a step's lines are written. Waits while our lease is in doubt; raises when it is over."""
        self._runner.check_lease(timeout_s=PUBLISH_TIMEOUT_S)

    def step(self, step: int) -> None:
        """A step's lines have been written."""
        self._history.note(Op.STEP, step=step)

    def resumed(self, step: int) -> None:
        """Goes on after ``step``; whatever older attempts write beyond it counts no more."""
        write_resumed(self._runner.attempt_files, self._runner.phase.name, step)
        self._history.note(Op.RESUMED, step=step)

    def allow_checkpoint(self, step: int) -> None:
        """Before a checkpoint is renamed into place. Raises StaleAttempt to prevent it."""
        phase = self._runner.phase.name
        self._publish(self._keys.checkpoint(phase), Op.CHECKPOINT, step=step)

    def model(self, role: str, step: int, *, written: Path) -> Path:
        """Renames ``written``, a whole model directory, to ``step-<step>`` and points ``latest`` to it."""
        final = written.parent / f"step-{step:06d}"
        self._publish(self._keys.saved_model(role), Op.SAVE, step=step, role=role)
        if final.is_dir():  # an older attempt's
            shutil.rmtree(final)
        os.rename(written, final)
        _point(final.parent / "latest", final.name)
        return final

    def done(self, step: int) -> None:
        """All steps are done."""
        marker = {"token": self._runner.attempt.token, "step": step}
        self._publish(self._keys.done, Op.DONE, step=step)
        write_record(self._runner.attempt_files.done(self._runner.phase.name), marker)

    def _publish(self, key: str, op: Op, *, step: int, **about: Any) -> None:
        attempt, began = self._runner.attempt, time.time()
        told = {**about, "step": step, "attempt": attempt.number, "token": attempt.token}
        put = Put(key, json.dumps(told).encode())
        try:
            self._fence.publish([put], timeout_s=PUBLISH_TIMEOUT_S, what=op)
        except StaleAttempt:
            self._history.note(Op.REFUSED, step=step, what=op, **about)
            raise
        self._history.note(op, step=step, began=began, **about)


def _point(link: Path, name: str) -> None:
    """Makes ``link`` a symbolic link to ``name`` in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, link)
