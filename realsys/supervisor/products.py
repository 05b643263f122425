"""Results of a phase: whether it is done, how far it got, and its product for later phases."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from realsys.supervisor.health.first_failure import log_tail
from realsys.trial.records import AttemptRecord, PhaseFiles, TrialFiles, fresh, read_record
from realsys.trial.temporary_names import temporary_beside

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
    """Copies a phase's product to ``target`` atomically: copy beside it, flush, then rename.

    Several trials may publish the same product at once: the first one's is kept, and what others, or
    supervisors that were killed, have copied so far is removed.

    Raises:
        OSError: it can't be copied, and no other trial has published it.
    """
    source = Path(os.path.realpath(phase_files.checkpoints / "model" / "latest"))
    temporary = temporary_beside(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, temporary)
        _flush(temporary)
        os.rename(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        fresh(target.parent)
        if not target.is_dir():  # else another trial published the same content first
            raise
    _flush_folder(target.parent)
    for unfinished in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    logger.info("product published path=%s", target)


def _flush(folder: Path) -> None:
    """Flushes all that is in a folder to disk: a crash must not leave a renamed folder with empty files."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
