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

# Of the scorers of version 0.1.25: tests/by_hand/acceptance/attack_reasoning_gym.py plays exploits on all,
# and wants exactly those in these tables that it finds.
#
# Told in a plan where they are named, and left out of ``task.names=[*]``.
PAYING: Mapping[str, str] = {
    "codeio": "the right answer amid other text scores nearly 1",
    "coin_flip": "a number that begins as the right one does scores 1: 0 for 0.25",
    "complex_arithmetic": "NaN scores 1",
    "futoshiki": "cells that are right by chance score, so much text does",
    "game_of_life_halting": "any text scores 1",
    "gsm_symbolic": "the right number anywhere in the answer scores 1",
    "puzzle24": "any expression that is 24 scores 1, whatever its numbers",
    "quantum_lock": "letters amid other text are pressed: half of the score for any way to the target",
    "sokoban": "moves are read out of any text, so the right ones amid others score 1",
    "sudoku": "cells that are right score, so the right answer amid other text does",
    "time_intervals": "any number or time scores nearly 1",
    "word_sorting": "the right words amid others score the share that stands right",
}
# Those that refuse right answers in common forms (rewards/final_answers/stated_answer.py), with the form
# that they want: their prompts end with it.
REFUSING: Mapping[str, str] = {}
# Those that make no question without arguments.
UNFIT: Mapping[str, str] = {"composite": "it wants the generators that it is made of"}


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
