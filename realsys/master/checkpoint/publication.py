"""Publishes models, checkpoints and the done mark, each preceded by a fenced write.

The store checks that our attempt is still the newest in the same transaction that records the
publication. Only then is anything renamed into place. While the store is unavailable nothing is published
(StoreUnavailable, at once) and every call can be repeated, as outbox.py does.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from realsys.api.errors import StaleAttempt
from realsys.master.checkpoint.recover import RecoverCheckpoint, read_resumed
from realsys.name_resolve.fence import AttemptFence
from realsys.name_resolve.store import Put
from realsys.observability.history import HistoryLog, Op, history_file
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed, replace_symlink, write_record
from realsys.worker.runner import WorkerRunner

WRITER = "realsys.json"  # in a saved model: which attempt wrote it


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
            phase=runner.phase.name,
        )
        self.lineage = Lineage({})  # with this attempt as its head, once it goes on

    def close(self) -> None:
        """Closes the history."""
        self._history.close()

    def step(self, step: int) -> None:
        """Records that a step's lines have been written."""
        self._history.note(Op.STEP, step=step)

    def resumed(self, found: RecoverCheckpoint | None) -> None:
        """Publishes the resume record: from ``found``, or from nothing. Later writes of other attempts
        then no longer count."""
        files, phase = self._runner.attempt_files, self._runner.phase.name
        step, of = (found.step, found.attempt) if found else (0, 0)
        self._fence.check_with_retry(timeout_s=self._runner.patience_s)
        record = Resumed(attempt=files.number, phase=phase, step=step, of_attempt=of)
        write_record(files.resumed(phase), record)
        records = read_resumed(self._runner.trial_files, phase)
        self.lineage = Lineage.of({n: r for n, r in records.items() if n <= files.number})
        self._history.note(Op.RESUMED, step=step, of=of)

    def allow_checkpoint(self, step: int) -> None:
        """Fences the renaming of a checkpoint into place. Raises StaleAttempt to prevent it."""
        phase = self._runner.phase.name
        self._publish(self._keys.checkpoint(phase), Op.CHECKPOINT, step=step)

    def model(self, role: str, step: int, *, written: Path) -> Path:
        """Renames ``written``, a complete model directory, to ``step-<step>`` and points ``latest`` to
        it."""
        final = written.parent / f"step-{step:06d}"
        try:
            self._publish(self._keys.saved_model(role), Op.SAVE, step=step, role=role)
        except StaleAttempt:
            shutil.rmtree(written, ignore_errors=True)
            raise
        write_record(written / WRITER, {"attempt": self._runner.attempt.number, "step": step})
        if final.is_dir():
            self._refuse_if_newer(final)
            shutil.rmtree(final)
        os.rename(written, final)
        replace_symlink(final.parent / "latest", final.name)
        return final

    def done(self, step: int) -> None:
        """Publishes that all steps are done."""
        marker = {"token": self._runner.attempt.token, "step": step}
        self._publish(self._keys.done, Op.DONE, step=step)
        write_record(self._runner.attempt_files.done(self._runner.phase.name), marker)

    def _refuse_if_newer(self, final: Path) -> None:
        try:
            writer = int(json.loads((final / WRITER).read_text())["attempt"])
        except (OSError, ValueError, KeyError):
            return  # of a version that did not tell, or torn
        if writer > self._runner.attempt.number:
            raise StaleAttempt(
                f"attempt {writer} has saved this step, we are {self._runner.attempt.number}",
                where=str(final),
                fix="none: this process must exit, the newer attempt runs the trial",
            )

    def _check_folder(self) -> None:
        """Checks for newer attempts in the folder: with an etcd per attempt, its transactions don't see
        them."""
        newest = self._runner.trial_files.all_attempts()[-1].number
        if newest > self._runner.attempt.number:
            raise StaleAttempt(
                f"attempt {newest} has taken over, we are {self._runner.attempt.number}",
                where=str(self._runner.trial_files.attempts),
                fix="none: this process must exit, the newer attempt runs the trial",
            )

    def _publish(self, key: str, op: Op, *, step: int, **about: Any) -> None:
        attempt, began = self._runner.attempt, time.time()
        told = {**about, "step": step, "attempt": attempt.number, "token": attempt.token}
        put = Put(key, json.dumps(told).encode())
        try:
            self._check_folder()
            self._fence.write([put])
        except StaleAttempt:
            self._history.note(Op.REFUSED, step=step, what=op, **about)
            raise
        self._history.note(op, step=step, began=began, **about)
