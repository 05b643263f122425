"""Recovery checkpoints, whole or not at all: the master's half.

    recover/.step-000100.<attempt>/   workers write their state here, synced to disk
    recover/step-000100/              renamed when the manifest (hash of every file) is on disk

A crash at any moment leaves the older checkpoints untouched; what is not whole is refused by its
manifest and the newest whole one is taken. The newest ``keep`` stay.

A master that was cut off or stood still may rename its checkpoint after another attempt took over. The
manifest says whose it is, and each attempt has written down the step from which it went on: what an
older attempt wrote beyond that step is a *dead branch* and never taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.api.errors import CheckpointError, ClusterError
from realsys.api.trial import AttemptFiles, Resumed, TrialFiles, read_record, write_record
from realsys.transport.requests import RecoverSaved

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: the step after which it was taken, and its files by worker."""

    folder: Path
    step: int
    files: Mapping[str, Path]  # model_worker/0 → file


def begin(recover: Path, *, step: int, attempt: int) -> Path:
    """A new temporary folder for the workers to write into.

    Raises:
        ClusterError: the folder can't be made.
    """
    folder = recover / f".step-{step:06d}.{attempt}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ClusterError(
            f"the checkpoint's folder can't be made: {error}",
            where=str(folder),
            fix="free space or repair the permissions, then realsys resume",
        ) from error
    return folder


def commit(
    folder: Path,
    *,
    step: int,
    attempt: int,
    saved: Mapping[str, RecoverSaved],
    keep: int,
    resumed_step: int = 0,
    allow: Callable[[], None] = lambda: None,
) -> Path:
    """Writes the manifest, renames the folder into place, removes the oldest ones.

    Args:
        folder: from ``begin``, with every worker's file in it.
        saved: worker name → what it wrote.
        resumed_step: from which this attempt went on.
        allow: called when everything is on disk, right before the rename; raises to prevent it.
    Returns:
        The checkpoint's final folder.
    """
    manifest = {
        "version": VERSION,
        "step": step,
        "attempt": attempt,
        "files": {
            worker: {"file": s.file, "sha256": s.sha256, "bytes": s.num_bytes}
            for worker, s in saved.items()
        },
    }
    final = folder.parent / f"step-{step:06d}"
    try:
        _write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(folder)
        allow()
        if not final.is_dir():
            os.rename(folder, final)
        elif step > resumed_step or not _is_whole(final, list(saved)):
            shutil.rmtree(final, ignore_errors=True)  # an older attempt's dead branch, or torn
            os.rename(folder, final)
        # else it is the one that we went on from: it says the same, and must not be away for a moment
        _sync_folder(folder.parent)
    except OSError as error:
        raise ClusterError(
            f"the checkpoint can't be written: {error}",
            where=str(final),
            fix="free space or repair the permissions, then realsys resume",
        ) from error
    left_over = [p for p in final.parent.iterdir() if p.name.startswith(".step-")]
    for old in (*_folders(final.parent)[:-keep], *left_over):
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest_whole(
    recover: Path, *, workers: Sequence[str], resumed: Mapping[int, int] | None = None
) -> Checkpoint | None:
    """The newest checkpoint whose manifest and files are whole; None when there is none.

    Every file is read and hashed. A torn one, or one of a dead branch, is named in the log and passed
    over.

    Args:
        resumed: from ``read_resumed``.
    """
    for folder in reversed(_folders(recover)):
        try:
            return _read_whole(folder, workers, resumed or {})
        except CheckpointError as error:
            logger.warning("checkpoint refused folder=%s why=%s", folder, error.what)
    return None


def dead_after(attempt: int, resumed: Mapping[int, int]) -> int | None:
    """The step after which what ``attempt`` wrote is a dead branch; None: all of it counts. Pure."""
    return min((step for later, step in resumed.items() if later > attempt), default=None)


def read_resumed(files: TrialFiles, phase: str) -> dict[int, int]:
    """Attempt → the step from which it went on in ``phase``, of those that got so far."""
    found = {a.number: read_record(Resumed, a.resumed(phase)) for a in files.all_attempts()}
    return {number: record.step for number, record in found.items() if record is not None}


def write_resumed(files: AttemptFiles, phase: str, step: int) -> None:
    """Says from which step this attempt goes on, before it writes anything else."""
    write_record(files.resumed(phase), Resumed(attempt=files.number, phase=phase, step=step))


def _is_whole(folder: Path, workers: Sequence[str]) -> bool:
    try:
        _read_whole(folder, workers, {})
    except CheckpointError:
        return False
    return True


def _read_whole(folder: Path, workers: Sequence[str], resumed: Mapping[int, int]) -> Checkpoint:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        step, listed = int(manifest["step"]), dict(manifest["files"])
        attempt = int(manifest.get("attempt", 0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _torn(folder, f"its manifest can't be read: {error}") from error
    if manifest.get("version") != VERSION:
        raise _torn(folder, f"its version is {manifest.get('version')}, we read {VERSION}")
    last = dead_after(attempt, resumed)
    if last is not None and step > last:
        raise _torn(
            folder, f"attempt {attempt} wrote it after a newer one went on from step {last}"
        )
    if sorted(listed) != sorted(workers):
        raise _torn(folder, f"it is of workers {sorted(listed)}, not {sorted(workers)}")
    files = {}
    for worker, entry in listed.items():
        try:
            name, expected = str(entry["file"]), str(entry["sha256"])
            found = _hash(folder / name) if (folder / name).is_file() else "no file"
        except (KeyError, TypeError) as error:
            raise _torn(folder, f"its manifest says nothing of {worker}: {error!r}") from error
        except OSError as error:
            raise _torn(folder, f"{name} can't be read: {error}") from error
        if found != expected:
            raise _torn(folder, f"{name} has hash {found[:12]}, not {expected[:12]}")
        files[worker] = folder / name
    return Checkpoint(folder, step, files)


def _torn(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(why, where=str(folder), fix="nothing: the checkpoint before it is taken")


def _folders(recover: Path) -> list[Path]:
    if not recover.is_dir():
        return []
    found = [p for p in recover.iterdir() if p.is_dir() and re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
