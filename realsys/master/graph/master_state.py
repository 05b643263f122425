"""The master's own part of a checkpoint, stored as a file beside the workers'.

It contains what has been computed of the next step (without it a resumed run would generate that step's
samples again, with newer weights than the uninterrupted run used), and which rollouts are already made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realsys.api.data import SequenceMeta
from realsys.api.errors import CheckpointError
from realsys.master.graph.curriculum import CurriculumState
from realsys.master.graph.data_schedule import Datapoint
from realsys.master.graph.dynamic_sampling import SamplingState
from realsys.master.graph.model_function_call import CallReport

FILE = "master.json"


class PrefetchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step that was begun ahead of its turn.

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
    """A delivered datapoint that waits for training; its tensors are at ``holder``."""

    number: int
    holder: int
    meta: SequenceMeta
    stats: Mapping[str, float] = {}


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Consumed and answered prompts; ``ledger`` is the staleness ledger's own snapshot.

    ``drawn``: with a curriculum, the records of prompts that are neither trained nor filtered, by number.
    ``set_aside``: ids of records that could not be played or scored; ``num_unscored`` of them not scored.
    ``num_kept``: deliveries. ``unplayed``: prompt → times that it was not played or scored so far.
    ``in_outages``: the same, in outages; of no account but for the seeds of its next tries.
    """

    ledger: dict[str, Any]
    delivered: tuple[Delivered, ...]
    dataset_size: int
    drawn: dict[int, Datapoint] = {}
    set_aside: tuple[str, ...] = ()
    num_unscored: int = 0
    num_kept: int = 0
    unplayed: dict[int, int] = {}
    in_outages: dict[int, int] = {}


class MasterState(msgspec.Struct, frozen=True, kw_only=True):
    """The master's state; None for parts that a run does not have."""

    ahead: PrefetchedStep | None = None
    rollouts: Rollouts | None = None
    curriculum: CurriculumState | None = None
    sampling: SamplingState | None = None

    def kept(self, worker: int) -> tuple[str, ...] | None:
        """Returns the datapoints that model worker ``worker`` needs after a resume; None: all it saved.

        Deliveries that arrived while the checkpoint was written are generated again.
        """
        if self.rollouts is None:
            return None
        return tuple(d.meta.ids[0] for d in self.rollouts.delivered if d.holder == worker)


def read_state(path: Path) -> MasterState:
    """Reads a file that a checkpoint keeps (recover.py). Raises CheckpointError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MasterState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"the master's state can't be read: {error}",
            where=str(path),
            fix="remove this checkpoint's folder and realsys resume: the one before it is used",
        ) from error
