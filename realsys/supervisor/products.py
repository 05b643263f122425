"""Results of a phase: whether it is done, how far it got, and its product for later phases."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from realsys.supervisor.health.first_failure import log_tail
from realsys.trial.records import AttemptRecord, PhaseFiles, TrialFiles, fresh, read_record

logger = logging.getLogger(__name__)


def is_done(files: TrialFiles, attempt: AttemptRecord, phase: str) -> bool:
    """Returns whether the attempt's master has marked the phase as done, with the attempt's token."""
    path = files.attempt(attempt.number).done(phase)
    fresh(path.parent)  # the master writes it on another host
    try:
        marker = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return bool(marker.get("token") == attempt.token)


def attempt_that_finished(files: TrialFiles, phase: str) -> int | None:
    """Returns the attempt that finished the phase before its supervisor was lost.

    It counts only as the head of the phase's lineage: no later attempt continued the phase.
    """
    for attempt in reversed(files.all_attempts()):
        if attempt.resumed(phase).exists():  # else it did not get so far in this phase
            record = read_record(AttemptRecord, attempt.record)
            done = record is not None and is_done(files, record, phase)
            return attempt.number if done else None
    return None


def last_step(phase_files: PhaseFiles) -> int:
    """Returns the step of the last complete line of the metrics."""
    for line in reversed(log_tail(phase_files.metrics, lines=3)):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def publish(phase_files: PhaseFiles, target: Path) -> None:
    """Copies a phase's product to ``target`` atomically: copy beside it, then rename."""
    source = Path(os.path.realpath(phase_files.checkpoints / "model" / "latest"))
    temporary = target.parent / f".{target.name}.{os.getpid()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    try:
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():  # else another trial published the same content first
            raise
        shutil.rmtree(temporary)
    logger.info("product published path=%s", target)
