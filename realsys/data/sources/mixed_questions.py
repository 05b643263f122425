"""Data set ``mixture``: several sources of questions as one, each with arguments of its own.

An index stands for a source and a record of it (record_parts.py). The order of an epoch, the ledger and a
resume know only the index, so what holds for one source's records holds for a mixture's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from realsys.api import registry
from realsys.api.basics.reward import TASK_SOURCE
from realsys.api.errors import DataError
from realsys.api.model import DatasetAbstraction
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.dataset_arguments import MixtureArguments
from realsys.data.sources.record_parts import epoch_of, items_of_epoch, place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedQuestions(MixtureArguments):
    """Records of all sources in turns; of held-out ones, each once.

    Raises:
        DataError: a source has no record, or can't be read; weights make too long an epoch.
    """

    tokenizer: Any
    seed: int
    items: dict[str, int] = field(init=False, repr=False)
    _parts: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts, sizes = {}, {}
        for name, args in self.sources.items():
            given = {**args, TASK_SOURCE: name, "split": self.split}
            parts[name] = registry.make_dataset(
                DatasetAbstraction(self.of, given), tokenizer=self.tokenizer, seed=self.seed
            )
            if size := len(parts[name]):
                sizes[name] = size
            elif self.split == "train":
                raise DataError(
                    f"source {name!r} has no records to train on",
                    where=f"task.sources.{name}",
                    fix="give it more, lower its eval_size, or leave the source out",
                )
        training = self.split == "train"
        items = (
            items_of_epoch(sizes, self.weights, temperature=self.temperature) if training else sizes
        )
        for name, num in items.items():
            logger.info("source=%s records=%d items_of_epoch=%d", name, sizes[name], num)
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "items", items)

    def __len__(self) -> int:
        return sum(self.items.values())

    @property
    def source_items(self) -> dict[str, int]:
        """Items of an epoch by source, as the master is told."""
        return self.items

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of each datapoint's tensors."""
        return tuple(next(iter(self._parts.values())).keys)

    @property
    def records(self) -> MixedQuestions:
        """What tells ``where`` a record stands."""
        return self

    def where(self, index: int) -> str:
        """Returns the source of a record, and where it stands in it."""
        name, row = self.find(index)
        return f"{name}: {self._parts[name].records.where(row)}"

    def find(self, index: int, id_: str = "") -> tuple[str, int]:
        """Returns the source that ``index`` stands for, and the record's number in it.

        Args:
            id_: of the datapoint, which begins with its epoch; without one it is the first.
        Raises:
            IndexError: there is none.
        """
        name, number = place(self.items, index)
        if self.goes_on:
            number += epoch_of(id_) * self.items[name]
        return name, number % len(self._parts[name])

    def record(self, index: int) -> dict[str, Any]:
        """Returns a record of the first epoch for environments and rules, with ``task_source``."""
        return self.record_of(index, "")

    def record_of(self, index: int, id_: str) -> dict[str, Any]:
        """Returns the record of a datapoint, as ``record`` does."""
        name, row = self.find(index, id_)
        found: dict[str, Any] = self._parts[name].record(row)
        return found

    def question_text(self, index: int) -> str:
        """Returns what a record of the first epoch asks, as text."""
        return self.question_text_of(index, "")

    def question_text_of(self, index: int, id_: str) -> str:
        """Returns what a datapoint asks, as text."""
        name, row = self.find(index, id_)
        return str(self._parts[name].question_text(row))

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Returns the records at ``indices`` under the names ``ids``."""
        found = []
        for index, id_ in zip(indices, ids, strict=True):
            name, row = self.find(index, id_)
            found.append(self._parts[name].batch([row], [id_]))
        return SequenceSample.gather(found)
