"""Questions of the package reasoning-gym, made again wherever they are scored. No torch.

Its scorers read an entry's metadata, which JSON could not carry for all generators; so a record has the
generator's name, arguments and seed, and the entry is made from them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any


def generators() -> tuple[str, ...]:
    """Names of reasoning-gym's generators."""
    import reasoning_gym.factory as factory  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return tuple(sorted(factory.DATASETS))


def question_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the question and the known answer of a record with ``generator``, ``seed`` and ``config``."""
    _, entry = entry_of(record)
    return str(entry["question"]), str(entry["answer"])


def entry_of(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the data set and the entry that a record names."""
    config = json.dumps(record["config"], sort_keys=True)
    return made_entry(record["generator"], record["seed"], config)


@functools.lru_cache(maxsize=4096)
def made_entry(name: str, seed: int, config: str) -> tuple[Any, Any]:
    """Makes the one entry of a data set; ``config`` is JSON."""
    import reasoning_gym  # type: ignore[import-not-found,import-untyped,unused-ignore]

    data = reasoning_gym.create_dataset(name, size=1, seed=seed, **json.loads(config))
    return data, data[0]
