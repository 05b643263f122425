"""Questions of the package reasoning-gym, made again wherever they are scored. No torch.

Its scorers read an entry's metadata, which JSON could not carry for all generators; so a record has the
generator's name and arguments and the question's number, and the entry is made from them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

DATASET_SIZE = 16384  # word_ladder makes at most 20,000
NUM_DATASETS = 16
SET_HERE = ("seed", "size")  # arguments of every generator
NUM_QUESTIONS = DATASET_SIZE * NUM_DATASETS  # of each generator, for each set of arguments


def generators() -> tuple[str, ...]:
    """Names of reasoning-gym's generators."""
    import reasoning_gym.factory as factory  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return tuple(sorted(factory.DATASETS))


def arguments_of(name: str) -> tuple[str, ...] | None:
    """Names of a generator's arguments, besides the two that are set here; None: they can't be listed."""
    import reasoning_gym.factory as factory

    _, config = factory.DATASETS[name]
    if not dataclasses.is_dataclass(config):
        return None
    return tuple(f.name for f in dataclasses.fields(config) if f.init and f.name not in SET_HERE)


def question_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns question and answer of a record with ``generator``, ``number`` and ``config``."""
    _, entry = entry_of(record)
    return str(entry["question"]), str(entry["answer"])


def entry_of(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the data set and the entry that a record names."""
    config = json.dumps(record["config"], sort_keys=True)
    return _entry(record["generator"], record["number"], config)


@functools.lru_cache(maxsize=4096)
def _entry(name: str, number: int, config: str) -> tuple[Any, Any]:
    seed, index = divmod(number, DATASET_SIZE)
    data = _dataset(name, seed, config)
    return data, data[index]


# Some generators read a dictionary when they are made: not for each question.
@functools.lru_cache(maxsize=4 * NUM_DATASETS)
def _dataset(name: str, seed: int, config: str) -> Any:
    import reasoning_gym  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # Entry i is drawn from seed + i: the next data set begins where this one ends.
    return reasoning_gym.create_dataset(
        name, size=DATASET_SIZE, seed=seed * DATASET_SIZE, **json.loads(config)
    )
