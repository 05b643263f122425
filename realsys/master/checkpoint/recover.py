"""Writes and finds recovery checkpoints, atomically: the master's part.

    recover/.step-000100.<attempt>/   workers write their state here, synced to disk
    recover/step-000100.<attempt>/    renamed when the manifest (hash of every file) is on disk

A crash at any moment leaves the older checkpoints untouched; an incomplete one is rejected by its
manifest and the newest complete one is used. The newest ``keep`` are kept.

Names and manifests identify a checkpoint's attempt, so that no attempt touches another one's; one that no
longer counts (lineage.py) is never used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from realsys.api.errors import CheckpointError, ClusterError
from realsys.master.graph.master_state import FILE as STATE
from realsys.master.graph.master_state import MasterState
from realsys.observability.jsonl import read_jsonl
from realsys.transport.worker_requests import RecoverSaved
from realsys.trial.folders import PRIVATE
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed, TrialFiles, read_record

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MASTER = "master_worker/0"  # its file exists only if the master had state to save
VERSION = 1
NO_FILE = "no file"
# Files of a checkpoint, by worker → (hash, ""), or ("", why it can't be read).
HashesOf = Callable[[Mapping[str, Path]], Mapping[str, tuple[str, str]]]


@dataclass(frozen=True)
class RecoverCheckpoint:
    """A complete checkpoint: the step after which it was taken, and its files by worker."""

    folder: Path
    step: int
    attempt: int
    files: Mapping[str, Path]  # model_worker/0 → file; the master's, if it has one


def begin(recover: Path, *, step: int, attempt: int) -> Path:
    """Creates a new temporary folder for the workers' files.

    Raises:
        ClusterError: the folder can't be made.
    """
    folder = recover / f".step-{step:06d}.{attempt}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        recover.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE)
    except OSError as error:
        raise ClusterError(
            f"the checkpoint's folder can't be made: {error}",
            where=str(folder),
            fix="free space or repair the permissions, then realsys resume",
        ) from error
    return folder


def complete(
    folder: Path,
    *,
    step: int,
    attempt: int,
    saved: Mapping[str, RecoverSaved],
    state: MasterState | None = None,
) -> None:
    """Writes the manifest, after which the checkpoint is complete except for its name.

    Args:
        folder: from ``begin``, with every worker's file in it.
        saved: worker name → what it wrote.
        state: what the master itself must remember.
    """
    manifest: dict[str, Any] = {
        "version": VERSION,
        "step": step,
        "attempt": attempt,
        "files": {
            worker: {"file": s.file, "sha256": s.sha256, "bytes": s.num_bytes}
            for worker, s in saved.items()
        },
    }
    try:
        if state is not None:
            _write_synced(folder / STATE, msgspec.json.encode(state))
            data = {"file": STATE, "sha256": _hash(folder / STATE)}
            manifest["files"][MASTER] = {**data, "bytes": (folder / STATE).stat().st_size}
        _write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(folder)
    except OSError as error:
        raise _not_written(error, folder.parent / f"step-{step:06d}.{attempt}") from error


def publish(
    folder: Path,
    *,
    step: int,
    attempt: int,
    keep: int,
    lineage: Lineage,
    allow: Callable[[], None] = lambda: None,
) -> Path:
    """Renames a complete folder into place; removes the oldest ones, and dead ones.

    Args:
        lineage: of the trial with this attempt as its head.
        allow: called right before the rename; raises to prevent it.
    Returns:
        The checkpoint's final folder.
    """
    final = folder.parent / f"step-{step:06d}.{attempt}"
    try:
        allow()
        if final.is_dir():  # this attempt's, of this step: it says the same,
            shutil.rmtree(folder, ignore_errors=True)  # and must not be away for a moment
        else:
            os.rename(folder, final)
        _sync_folder(folder.parent)
    except OSError as error:
        raise _not_written(error, final) from error
    for old in _no_longer_needed(final.parent, step, attempt, keep, lineage):
        shutil.rmtree(old, ignore_errors=True)
    return final


def withdraw(folder: Path) -> None:
    """Removes a complete folder that was never published because a newer one replaced it."""
    shutil.rmtree(folder, ignore_errors=True)


def _not_written(error: OSError, folder: Path) -> ClusterError:
    return ClusterError(
        f"the checkpoint can't be written: {error}",
        where=str(folder),
        fix="free space or repair the permissions, then realsys resume",
    )


def _no_longer_needed(
    recover: Path, step: int, attempt: int, keep: int, lineage: Lineage
) -> list[Path]:
    """Returns the checkpoints to remove: of this attempt and earlier ones, all but the newest ``keep``
    that count.

    Those of a newer attempt are left alone, since then this attempt no longer counts. So are ours after
    ``step``: the next one may be in progress while this one is published.
    """
    ours = [found for found in _folders(recover) if found.attempt <= attempt]
    counting = [f for f in ours if lineage.counts(f.attempt, f.step)]
    half_done = [
        f
        for f in _folders(recover, prefix=".step-")
        if f.attempt < attempt or (f.attempt == attempt and f.step <= step)
    ]
    return [f.path for f in (*ours, *half_done) if f not in counting[-keep:]]


def newest_whole(
    recover: Path,
    *,
    workers: Sequence[str],
    lineage: Lineage,
    ledger_of: Callable[[int, int], Path] | None = None,
    hashes_of: HashesOf | None = None,
) -> RecoverCheckpoint | None:
    """Returns the newest checkpoint whose manifest and files are complete; None if there is none.

    Every file is read and hashed, by its worker if there are workers. A damaged checkpoint is logged and
    skipped, as is one that does not count, and one whose steps are missing in the ledger.

    Args:
        ledger_of: (attempt, step) of a checkpoint → the ledger with which a run from there would resume.
        hashes_of: reads files for us, side by side: worker → file to its hash, or why there is none.
    Raises:
        CheckpointError: there are whole ones, and the ledger covers none of them.
    """
    uncovered: CheckpointError | None = None
    for found in reversed(_folders(recover)):
        try:
            if not lineage.counts(found.attempt, found.step):
                raise _torn(found.path, "it does not count: another attempt had taken over before")
            whole = _read_whole(found, workers, hashes_of or _hashes)
            if ledger_of is None:
                return whole
            ledger = ledger_of(found.attempt, found.step)
            lacks = lacking_steps(read_jsonl(ledger), found.step)
            if not lacks:
                return whole
            error = _uncovered(found, ledger, lacks)
            uncovered = uncovered or error
            raise error
        except CheckpointError as why:
            logger.warning("checkpoint refused folder=%s reason=%s", found.path, why.what)
    if uncovered is not None:
        raise uncovered
    return None


def lacking_steps(ledger: Iterable[Mapping[str, Any]], last_step: int) -> list[int]:
    """Returns the steps up to ``last_step`` that do not have exactly one row in the ledger (pure)."""
    counts = Counter(row.get("step") for row in ledger)
    return [step for step in range(1, last_step + 1) if counts[step] != 1]


def _uncovered(found: _Folder, ledger: Path, lacks: Sequence[int]) -> CheckpointError:
    shown = ", ".join(map(str, lacks[:5])) + (f" and {len(lacks) - 5} more" * (len(lacks) > 5))
    return CheckpointError(
        f"the ledger does not have one row for each step of the checkpoint of step {found.step}: "
        f"check step {shown}. The record of what was trained on would be incomplete",
        where=f"{ledger} and {found.path}",
        fix="restore the ledger from a backup and resume; or launch a new trial that begins with the "
        "weights of a saved model (actor.path=<trial folder>/checkpoints/actor/latest)",
    )


def adopt(found: RecoverCheckpoint, *, attempt: int) -> RecoverCheckpoint | None:
    """Makes this attempt's copy of a checkpoint, by hard links, so that the other attempt's clean-up
    can't remove it.

    If the file system does not support hard links, the original is used. Returns None if it is gone:
    search again.
    """
    final = found.folder.parent / f"step-{found.step:06d}.{attempt}"
    if final == found.folder:
        return found
    folder = begin(found.folder.parent, step=found.step, attempt=attempt)
    try:
        for file in found.folder.iterdir():
            if file.name != MANIFEST:
                os.link(file, folder / file.name)
        manifest = json.loads((found.folder / MANIFEST).read_text())
        _write_synced(
            folder / MANIFEST, json.dumps({**manifest, "attempt": attempt}, indent=1).encode()
        )
        _sync_folder(folder)
        os.rename(folder, final)
        _sync_folder(folder.parent)
    except OSError as error:
        logger.warning("checkpoint not adopted folder=%s error=%s", found.folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return found if found.folder.is_dir() else None
    files = {worker: final / file.name for worker, file in found.files.items()}
    return RecoverCheckpoint(final, found.step, attempt, files)


def read_resumed(files: TrialFiles, phase: str) -> dict[int, Resumed]:
    """Returns attempt → its resume record in ``phase``, for the attempts that have one."""
    found = {a.number: read_record(Resumed, a.resumed(phase)) for a in files.all_attempts()}
    return {number: record for number, record in found.items() if record is not None}


def _read_whole(found: _Folder, workers: Sequence[str], hashes_of: HashesOf) -> RecoverCheckpoint:
    folder = found.path
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        step, listed = int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _torn(folder, f"its manifest can't be read: {error}") from error
    if manifest.get("version") != VERSION:
        raise _torn(folder, f"its version is {manifest.get('version')}, we read {VERSION}")
    if sorted(listed.keys() - {MASTER}) != sorted(workers):
        raise _torn(folder, f"it is of workers {sorted(listed)}, not {sorted(workers)}")
    files, expected = {}, {}
    for worker, entry in listed.items():
        try:
            files[worker], expected[worker] = folder / str(entry["file"]), str(entry["sha256"])
        except (KeyError, TypeError) as error:
            raise _torn(folder, f"its manifest has no entry for {worker}: {error!r}") from error
    masters = {worker: file for worker, file in files.items() if worker == MASTER}
    others = {worker: file for worker, file in files.items() if worker != MASTER}
    read = {**_hashes(masters), **(hashes_of(others) if others else {})}
    for worker, file in files.items():
        digest, why = read[worker]
        if not digest and why != NO_FILE:
            raise _torn(folder, f"{file.name} can't be read: {why}")
        if digest != expected[worker]:
            found_hash = digest[:12] or NO_FILE
            raise _torn(folder, f"{file.name} has hash {found_hash}, not {expected[worker][:12]}")
    return RecoverCheckpoint(folder, step, found.attempt, files)


def _hashes(files: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
    """Hashes files one after the other, as a ``HashesOf``."""
    found = {}
    for worker, file in files.items():
        try:
            found[worker] = (_hash(file), "") if file.is_file() else ("", NO_FILE)
        except OSError as error:
            found[worker] = ("", str(error))
    return found


def _torn(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        why, where=str(folder), fix="none is needed: the checkpoint before it is used"
    )


class _Folder(NamedTuple):
    step: int
    attempt: int  # 0: written before names told it, whatever the manifest says
    path: Path


def _folders(recover: Path, *, prefix: str = "step-") -> list[_Folder]:
    """Returns the checkpoint folders in order of step and attempt."""
    if not recover.is_dir():
        return []
    found = []
    for path in recover.iterdir():
        name = re.fullmatch(re.escape(prefix) + r"(\d+)(?:\.(\d+))?", path.name)
        if name is not None and path.is_dir():
            found.append(_Folder(int(name[1]), int(name[2] or 0), path))
    return sorted(found)


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
