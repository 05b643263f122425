"""What the master itself must remember at a checkpoint, as a file beside the workers' own.

What has been computed of the next step (without it a resumed run would generate that step's samples
again, with newer weights than the uninterrupted run used), and which rollouts are made already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realsys.api.data import SequenceMeta
from realsys.api.errors import CheckpointError
from realsys.master.graph.model_function_call import CallReport

FILE = "master.json"


class PrefetchedStep(msgspec.Struct, frozen=True, kw_only=True):
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


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """A datapoint from a rollout worker that waits to be trained on; its tensors are at ``holder``."""

    number: int
    holder: int
    meta: SequenceMeta
    stats: Mapping[str, float] = {}


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Which prompts were consumed, and which are answered; ``ledger`` as it tells itself."""

    ledger: dict[str, Any]
    delivered: tuple[Delivered, ...]
    dataset_size: int


class MasterState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; None for what a run does not have."""

    ahead: PrefetchedStep | None = None
    rollouts: Rollouts | None = None

    def kept(self, worker: int) -> tuple[str, ...] | None:
        """Datapoints that model worker ``worker`` needs after a resume; None: all that it saved.

        What rollout workers put there while the checkpoint was written will be made again.
        """
        if self.rollouts is None:
            return None
        return tuple(d.meta.ids[0] for d in self.rollouts.delivered if d.holder == worker)


def write_state(path: Path, state: MasterState) -> None:
    """Writes and syncs it."""
    with path.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path) -> MasterState:
    """Reads what ``write_state`` wrote. Raises CheckpointError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MasterState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"what the master knew can't be read: {error}",
            where=str(path),
            fix="remove this checkpoint's folder and realsys resume: the one before it is taken",
        ) from error
