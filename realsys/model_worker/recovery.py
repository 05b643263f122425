"""One worker's state on disk, whole and checked: the worker's half of a recovery checkpoint.

The master's half (manifest, rename, choosing the newest whole one) is realsys/master/checkpoint/recover.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from realsys.api.errors import CheckpointError, ClusterError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def save_state(state: dict[str, Any], path: Path) -> tuple[str, int]:
    """Writes ``state`` (tensors and plain values) for its owner alone to read, syncs it to disk, returns
    (SHA-256, bytes).

    Raises:
        ClusterError: the disk is full or refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, _NEW, 0o600), "wb") as file:
            hashed: Any = _Hashed(file)
            torch.save(state, hashed)
            file.flush()
            os.fsync(file.fileno())
        return hashed.digest.hexdigest(), hashed.num_bytes
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        path.unlink(missing_ok=True)  # half a file helps nobody, and may be what fills the disk
        cause = error if isinstance(error, OSError) else error.__context__
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        why = f"no space left for {path.name}" if full else error
        raise ClusterError(
            f"the checkpoint can't be written: {why}",
            where=str(path),
            fix="free space or repair the permissions, then realsys resume; older ones are whole",
        ) from error


class _Hashed:
    """A file that is written from beginning to end, and hashed on the way: reading it again takes seconds
    for what a GPU's worker keeps, and nothing is trained meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest, self.num_bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """As a file's; all of ``data`` is taken."""
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self._file.write(view)
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()


def hash_of(path: Path) -> tuple[str, str]:
    """SHA-256 of a file, and nothing; or nothing, and why it can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), ""
    except FileNotFoundError:
        return "", "no file"
    except OSError as error:
        return "", str(error)


def load_state(path: Path) -> dict[str, Any]:
    """Reads what ``save_state`` wrote. Only tensors and plain values are ever unpickled.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"the checkpoint can't be read: {error}",
            where=str(path),
            fix="remove this checkpoint's folder and realsys resume: the one before it is taken",
        ) from error
