"""Recovery checkpoints, whole or not at all: the master's half.

    recover/.step-000100.<attempt>/   workers write their state here, synced to disk
    recover/step-000100/              renamed when the manifest (hash of every file) is on disk

A crash at any moment leaves the older checkpoints untouched; what is not whole is refused by its
manifest and the newest whole one is taken. The newest ``keep`` stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.api.errors import CheckpointError, ClusterError
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


def commit(folder: Path, *, step: int, saved: Mapping[str, RecoverSaved], keep: int) -> Path:
    """Writes the manifest, renames the folder into place, removes the oldest ones.

    Args:
        folder: from ``begin``, with every worker's file in it.
        saved: worker name → what it wrote.
    Returns:
        The checkpoint's final folder.
    """
    manifest = {
        "version": VERSION,
        "step": step,
        "files": {
            worker: {"file": s.file, "sha256": s.sha256, "bytes": s.num_bytes}
            for worker, s in saved.items()
        },
    }
    final = folder.parent / f"step-{step:06d}"
    try:
        _write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(folder)
        if final.is_dir():  # an older attempt's, of the same step
            _exchange(folder, final, workers=list(saved))
        else:
            os.rename(folder, final)
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


def newest_whole(recover: Path, *, workers: Sequence[str]) -> Checkpoint | None:
    """The newest checkpoint whose manifest and files are whole; None when there is none.

    Every file is read and hashed. A torn one is named in the log and passed over.
    """
    for folder in reversed(_folders(recover)):
        try:
            return _read_whole(folder, workers)
        except CheckpointError as error:
            logger.warning("checkpoint refused folder=%s why=%s", folder, error.what)
    return None


def _read_whole(folder: Path, workers: Sequence[str]) -> Checkpoint:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        step, listed = int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _torn(folder, f"its manifest can't be read: {error}") from error
    if manifest.get("version") != VERSION:
        raise _torn(folder, f"its version is {manifest.get('version')}, we read {VERSION}")
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


def _exchange(folder: Path, final: Path, *, workers: Sequence[str]) -> None:
    """Puts ``folder`` in the place of ``final``, unless that one is whole: then it says the same."""
    try:
        _read_whole(final, workers)
    except CheckpointError:
        shutil.rmtree(final, ignore_errors=True)  # no checkpoint is lost: it was none
        os.rename(folder, final)


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
