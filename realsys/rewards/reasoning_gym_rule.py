"""Rule ``reasoning_gym``: the scorer of the generator that made a question.

The answer is what stands in the last ``<answer>…</answer>``, else the whole response. The package's scorers
read an entry's metadata, so the entry is made again, from the generator's name, arguments and seed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def generators() -> tuple[str, ...]:
    """Names of reasoning-gym's generators."""
    import reasoning_gym.factory as factory  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return tuple(sorted(factory.DATASETS))


def question_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the question and the known answer of a record with ``generator``, ``seed`` and ``config``."""
    _, entry = _entry(record)
    return str(entry["question"]), str(entry["answer"])


def reasoning_gym_reward(*, response: str, record: Mapping[str, Any]) -> float:
    """Returns the scorer's number, from 0 to 1."""
    data, entry = _entry(record)
    marked = _ANSWER.findall(response)
    text = marked[-1] if marked else response
    return float(data.score_answer(text.strip(), entry))


def _entry(record: Mapping[str, Any]) -> tuple[Any, Any]:
    config = json.dumps(record["config"], sort_keys=True)
    return _made(record["generator"], record["seed"], config)


@functools.lru_cache(maxsize=4096)
def _made(name: str, seed: int, config: str) -> tuple[Any, Any]:
    import reasoning_gym  # type: ignore[import-not-found,import-untyped,unused-ignore]

    data = reasoning_gym.create_dataset(name, size=1, seed=seed, **json.loads(config))
    return data, data[0]
