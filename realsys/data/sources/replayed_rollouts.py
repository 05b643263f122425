"""Data set of an earlier run's rollouts, for training on them again in a replay.

Datapoints are found by id; the earlier run's ledger records which step trained on which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import parse_json, read_bounded_text
from realsys.api.errors import DataError
from realsys.data.rollout_dump import RolloutDump
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.dataset_arguments import RolloutDumpArguments
from realsys.trial.dump_records import SUFFIX
from realsys.trial.records import RUN_FILE


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutDumpData(RolloutDumpArguments):
    """Datapoints of a run's dump."""

    tokenizer: Any = None
    seed: int = 0
    _dump: RolloutDump = field(init=False, repr=False)
    _size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        files = sorted(Path(self.folder).glob(f"*{SUFFIX}"))
        if not files:
            raise DataError(
                "no rollouts were dumped here",
                where=self.folder,
                fix="replay a run that was started with schedule.dump=true",
            )
        object.__setattr__(self, "_dump", RolloutDump(files))
        try:
            run = parse_json(read_bounded_text(Path(self.folder, RUN_FILE)))
            object.__setattr__(self, "_size", int(run["dataset_size"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the run's record of its rollouts can't be read: {error!r}",
                where=f"{self.folder}/{RUN_FILE}",
                fix="copy it again",
            ) from error

    def __len__(self) -> int:
        """Number of records in the original run's data set, which determines the run's length."""
        return self._size

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """Reads the datapoints ``ids``; ``indices`` are ignored."""
        return self._dump.read(ids).select(self.keys)
