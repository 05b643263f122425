"""Writes and reads one worker's state on disk, complete and checked: its part of a recovery checkpoint.

The master's part (manifest, rename, selection of the newest complete one) is
realsys/master/checkpoint/recover.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from realsys.api.errors import CheckpointError, ClusterError

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def save_state(state: dict[str, Any], path: Path) -> tuple[str, int]:
    """Writes ``state`` to a file readable by its owner alone and syncs it; returns (SHA-256, bytes).

    ``state`` holds tensors and plain values.

    Raises:
        ClusterError: the disk is full or the write failed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, _CREATE_FLAGS, 0o600), "wb") as file:
            hashed: Any = _HashingFile(file)
            torch.save(state, hashed)
            file.flush()
            os.fsync(file.fileno())
        return hashed.digest.hexdigest(), hashed.num_bytes
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        path.unlink(missing_ok=True)  # a partial file is useless and may be what fills the disk
        cause = error if isinstance(error, OSError) else error.__context__
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        why = f"no space left for {path.name}" if full else error
        raise ClusterError(
            f"the checkpoint can't be written: {why}",
            where=str(path),
            fix="free space or repair the permissions, then realsys resume; older ones are whole",
        ) from error


class _HashingFile:
    """A file that hashes what is written, sequentially.

    Reading it again would take seconds for a GPU worker's state, while training waits.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest, self.num_bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Writes all of ``data``, as a file does."""
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self._file.write(view)
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()


def hash_file(path: Path) -> tuple[str, str]:
    """Returns the SHA-256 of a file and an empty text, or an empty hash and the reason it can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), ""
    except FileNotFoundError:
        return "", "no file"
    except OSError as error:
        return "", str(error)


def load_state(path: Path) -> dict[str, Any]:
    """Reads a file of ``save_state``. Only tensors and plain values are unpickled.

    Raises:
        CheckpointError: the file can't be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"the checkpoint can't be read: {error}",
            where=str(path),
            fix="remove this checkpoint's folder and realsys resume: the one before it is taken",
        ) from error
