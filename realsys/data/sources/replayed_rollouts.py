"""What rollout workers of an earlier run made, as a data set: a replay trains on it again.

Datapoints are found by id; which step trained on which is the earlier run's ledger's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from realsys.api.bounded_files import parse_json, read_bounded_text
from realsys.api.errors import DataError
from realsys.data.rollout_dump import SUFFIX, RolloutDump
from realsys.data.sequence_sample import SequenceSample
from realsys.trial.records import RUN_FILE


@dataclass
class RolloutDumpData:
    """The datapoints of a run's dump.

    Args:
        folder: with the run's dump files, and ``run.json`` of its master.
        keys: of each datapoint.
    """

    _: KW_ONLY
    folder: str
    keys: tuple[str, ...]
    tokenizer: Any = None
    seed: int = 0
    _dump: RolloutDump = field(init=False, repr=False)
    _size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.keys = tuple(self.keys)
        files = sorted(Path(self.folder).glob(f"*{SUFFIX}"))
        if not files:
            raise DataError(
                "no rollouts were dumped here",
                where=self.folder,
                fix="replay a run that was started with rollout.dump=true",
            )
        self._dump = RolloutDump(files)
        try:
            self._size = int(
                parse_json(read_bounded_text(Path(self.folder, RUN_FILE)))["dataset_size"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the run's own words on its rollouts can't be read: {error!r}",
                where=f"{self.folder}/{RUN_FILE}",
                fix="copy it again",
            ) from error

    def __len__(self) -> int:
        """Records of the data set that the run's questions came from: the run's length follows from it."""
        return self._size

    def batch(self, indices: Sequence[int], ids: Sequence[str]) -> SequenceSample:
        """The datapoints ``ids``; ``indices`` say nothing here."""
        return self._dump.read(ids).select(self.keys)
