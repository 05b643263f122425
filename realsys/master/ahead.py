"""What has been computed of the next step when a checkpoint is taken, as a file beside the workers' own.

Without it a resumed run would generate that step's samples again, with newer weights than the
uninterrupted run used.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from realsys.api.data import SequenceMeta
from realsys.api.errors import CheckpointError
from realsys.master.model_function_call import CallReport

FILE = "ahead.json"


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """The step that has begun ahead of its turn.

    Attributes:
        ids: its datapoints. calls: reports of its calls that are done.
        buffer, storage: as the sequence buffer and the storage tracker tell them.
    """

    step: int
    ids: tuple[str, ...]
    calls: dict[str, CallReport]
    buffer: list[tuple[SequenceMeta, tuple[str, ...]]]
    storage: list[tuple[str, str, list[int], int]]


def write_ahead(path: Path, ahead: Ahead) -> None:
    """Writes and syncs it."""
    with path.open("wb") as file:
        file.write(msgspec.json.encode(ahead))
        file.flush()
        os.fsync(file.fileno())


def read_ahead(path: Path) -> Ahead:
    """Reads what ``write_ahead`` wrote. Raises CheckpointError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ahead)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"what had run ahead can't be read: {error}",
            where=str(path),
            fix="remove this checkpoint's folder and realsys resume: the one before it is taken",
        ) from error
