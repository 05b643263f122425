"""Sources of a step's datapoints: the data set on model workers, or rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from realsys.api.data import SequenceMeta
from realsys.api.errors import DataError
from realsys.data.packing import contiguous
from realsys.master.graph.model_workers import ModelWorkers
from realsys.observability.jsonl import read_jsonl
from realsys.transport.worker_requests import Fetch, Fetched

FETCH_TIMEOUT_S = 600.0

Held = tuple[SequenceMeta, int]  # datapoints, and the model worker that has their tensors
Records = Callable[[int], Sequence[tuple[int, str]]]  # step (from 1) → index and id of each record


class Feed(Protocol):
    """Provides each step's datapoints."""

    async def load(self, step: int) -> Sequence[Held]:
        """Returns the datapoints of step ``step`` (from 1), in training order."""

    async def trained(self, step: int) -> None:
        """Notes that step ``step`` is done: its datapoints will not be requested again."""


@dataclass(frozen=True)
class StoredFeed:
    """Makes the workers that hold the data set, or a dump of rollouts, load each step's records.

    Attributes:
        records: those of the next ``load``; the index counts in a data set, the id in a dump.
    """

    records: Records
    workers: ModelWorkers
    data_workers: Sequence[int]

    async def load(self, step: int) -> list[Held]:
        """Makes each data worker load a contiguous part."""
        records = self.records(step)
        requests = {}
        parts = contiguous(len(records), len(self.data_workers))
        for worker, part in zip(self.data_workers, parts, strict=True):
            indices, ids = zip(*(records[i] for i in part), strict=True) if part else ((), ())
            requests[worker] = partial(Fetch, indices=indices, ids=ids)
        replies: dict[int, Fetched] = await self.workers.call(
            requests, timeout_s=FETCH_TIMEOUT_S, what=f"fetch step {step}"
        )
        # In the given order, so that a batch does not depend on who answered first.
        return [(replies[worker].meta, worker) for worker in self.data_workers]

    async def trained(self, step: int) -> None:
        """Does nothing: the records depend only on the step."""


def recorded_steps(ledger: Path) -> list[list[str]]:
    """Returns the ids that each step of an earlier run trained on, from step 1.

    Raises:
        DataError: the ledger is not there, or misses a step.
    """
    rows = read_jsonl(ledger)
    steps = {int(row["step"]): list(row.get("samples") or row["ids"]) for row in rows}
    if sorted(steps) != list(range(1, len(steps) + 1)) or not steps:
        raise DataError(
            f"it has steps {sorted(steps)[:5]} …, not all from 1",
            where=str(ledger),
            fix="replay a run with a complete ledger",
        )
    return [steps[step] for step in sorted(steps)]
