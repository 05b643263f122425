"""Lists the saved checkpoints of a role, each with the digest of its weights.

A resumed run may save a step again, with the same weights or others: the contents of the files decide.
They are read once; after that unchanged size and modification time mean unchanged contents.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from realsys.evaluator.pending import SavedCheckpoint
from realsys.runtime.progress import tick

_STEP = re.compile(r"step-(\d+)")
_PIECE_BYTES = 1 << 22


class SavedCheckpoints:
    """Lists the checkpoints of ``role`` in ``folder``."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._role = folder, role
        self._digests: dict[tuple[int, str], str] = {}

    def add_known(self, step: int, stamp: str, weights: str) -> None:
        """Adds the digest of a checkpoint that was read before."""
        self._digests[step, stamp] = weights

    def present(self) -> list[SavedCheckpoint]:
        """Returns the present checkpoints, in order of steps."""
        return [c for step, path in self._folders() if (c := self._checkpoint(step, path))]

    def names(self) -> list[str]:
        """Returns the folder's entries, complete checkpoints or not: one call to its file system."""
        try:
            return sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return []

    def is_unchanged(self, checkpoint: SavedCheckpoint) -> bool:
        """Returns whether its files are still those that were read."""
        try:
            return stamp_of(weight_files(checkpoint.path)) == checkpoint.stamp
        except OSError:
            return False

    def _folders(self) -> list[tuple[int, Path]]:
        found = [(m, self._folder / name) for name in self.names() if (m := _STEP.fullmatch(name))]
        return sorted((int(match[1]), path) for match, path in found if path.is_dir())

    def _checkpoint(self, step: int, path: Path) -> SavedCheckpoint | None:
        """Reads a checkpoint; returns None if it is just being replaced."""
        try:
            files = weight_files(path)
            stamp = stamp_of(files)
            if (step, stamp) not in self._digests:
                self._digests[step, stamp] = digest_of(files)
        except OSError:
            return None
        return SavedCheckpoint(
            role=self._role,
            step=step,
            path=path,
            weights=self._digests[step, stamp],
            stamp=stamp,
        )


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a Hugging Face directory, adapters in their own folder included."""
    return sorted(folder.glob("*.safetensors"))


def stamp_of(files: Iterable[Path]) -> str:
    """Returns names, sizes and modification times."""
    stats = [(path.name, path.stat()) for path in files]
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def digest_of(files: Iterable[Path]) -> str:
    """Returns the first 32 hex digits of SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                tick()
    return digest.hexdigest()[:32]
