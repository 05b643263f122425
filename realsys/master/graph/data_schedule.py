"""Assigns the data set's records to steps (pure): the whole order of a run from its seed.

The run reads one endless stream: the records of epoch 0 in that epoch's order, then those of epoch 1, and
so on; step ``k`` takes the next batch of it. So each record is used exactly once per epoch, also if a
batch crosses into the next, and a resumed run needs only the step's number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Datapoint:
    """One record in one epoch."""

    epoch: int
    index: int

    @property
    def id(self) -> str:
        """Id, unique over the run."""
        return f"{self.epoch}-{self.index}"

    @classmethod
    def of(cls, id: str) -> Datapoint:
        """Returns the datapoint with this id."""
        epoch, _, index = id.partition("-")
        return cls(int(epoch), int(index))


@dataclass(frozen=True, kw_only=True)
class DataSchedule:
    """The order of a run over ``dataset_size`` records."""

    dataset_size: int
    batch_size: int
    seed: int
    shuffle: bool

    def batch(self, step: int) -> list[Datapoint]:
        """The datapoints of step ``step`` (from 0)."""
        first = step * self.batch_size
        return [self.at(position) for position in range(first, first + self.batch_size)]

    def indexed_ids(self, step: int) -> list[tuple[int, str]]:
        """Returns index and id of each datapoint of a step, from 1."""
        return [(point.index, point.id) for point in self.batch(step - 1)]

    def epoch_of(self, step: int) -> int:
        """Epoch of a step's last datapoint."""
        return ((step + 1) * self.batch_size - 1) // self.dataset_size

    def at(self, position: int) -> Datapoint:
        """Returns the datapoint at a position of the run's endless order, from 0."""
        epoch, place = divmod(position, self.dataset_size)
        if not self.shuffle:
            return Datapoint(epoch, place)
        return Datapoint(epoch, _permutation(self.dataset_size, self.seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    return shuffled(size, f"{seed}/{epoch}")


def shuffled(size: int, seed: str) -> list[int]:
    """Returns 0 … ``size`` − 1 in the order of a seed."""
    order = list(range(size))
    # A text seed is hashed by SHA-512: the same in every process, unlike hash().
    random.Random(seed).shuffle(order)
    return order
