"""What a user's code may return as a reward, by a table that was written without reading the code.

``reward_values.jsonl``: an expression; the number that it is, ``"text"`` for an answer to be judged, null
for an error. ``JUDGED_OTHERWISE``: rows of it that are ours to decide, and why.
"""

from __future__ import annotations

import concurrent.futures  # noqa: F401  # of rows
import dataclasses
import decimal
import fractions
import json
import math
import unittest.mock  # noqa: F401  # of rows
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
import torch

from realsys.api.basics.reward import LARGEST
from realsys.api.errors import RewardError, RolloutError
from realsys.api.users_code.reward_numbers import (
    NoNumber,
    finite_number,
    is_number,
    plain_number,
    python_number,
)
from realsys.rewards.scores import checked_score, numbers_of
from realsys.rollout.runners.hosted_agent import returned_outcome
from realsys.rollout.runners.hosts.function_host import usable

NAMES = {
    "np": np,
    "torch": torch,
    "decimal": decimal,
    "fractions": fractions,
    "math": math,
    "dataclasses": dataclasses,
}
ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("reward_values.jsonl").read_text().splitlines()
]
LAST = "the policy's last answer is judged"
JUDGED_OTHERWISE = {
    # Documented since the first version: a function without a result has its episode judged
    "None": LAST,
    "__import__('re').match('a','b')": LAST,
    "{'reward':None,'answer':'42'}": "text",  # as if there were no key: the row allows it
    "{'answer':42}": "text",  # a whole number, written as one: the row allows it
    "type('S',(),{'__float__':lambda s:0.5})()": 0.5,  # as Decimal; the row allows it
}
OURS: list[tuple[Any, Any]] = [
    (torch.tensor(3, dtype=torch.int8), 3.0),
    (np.array(5, dtype="timedelta64[ns]"), None),
    (np.array(b"1"), None),
    (np.clongdouble(1), None),
    (fractions.Fraction(1, 3), 1 / 3),
]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Some rows make numpy warn, or are coroutines that nobody awaits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(code: str) -> Any:
    return eval(code, dict(NAMES))


def drop(value: Any) -> None:
    """Closes a row's coroutine."""
    for one in (value, *(value.values() if isinstance(value, dict) else ())):
        if hasattr(one, "cr_code"):
            one.close()


def differences(found_of: Callable[[Any], Any], wanted_of: Callable[[Any], Any]) -> list[Any]:
    """Rows whose value is taken otherwise: code, what was found, what is wanted."""
    different = []
    for row in ROWS:
        code, value = row["code"], made(row["code"])
        wanted = wanted_of(JUDGED_OTHERWISE.get(code, row["value"]))
        if (found := found_of(value)) != wanted:
            different.append((code, found, wanted))
        drop(value)
    return different


def test_what_a_function_returns_ends_its_episode_as_the_table_says() -> None:
    def found_of(value: Any) -> Any:
        try:
            outcome = returned_outcome(json.loads(json.dumps(usable(value))))
        except (ValueError, RolloutError):
            return None
        if outcome.reward is not None:
            return outcome.reward
        return LAST if outcome.text is None else "text"

    assert differences(found_of, lambda wanted: wanted) == []


def test_a_rule_takes_the_same_numbers_and_no_text() -> None:
    def found_of(value: Any) -> Any:
        try:
            return checked_score(
                value.get("reward") if hasattr(value, "get") else value, source="x"
            )
        except RewardError:
            return None

    def wanted_of(wanted: Any) -> Any:
        return wanted if isinstance(wanted, float) and abs(wanted) <= LARGEST else None

    assert differences(found_of, wanted_of) == []


@pytest.mark.parametrize(("value", "wanted"), OURS, ids=str)
def test_rows_of_our_own(value: Any, wanted: float | None) -> None:
    assert is_number(value) == (wanted is not None)
    if wanted is None:
        with golden.raises(NoNumber):
            finite_number(value)
    else:
        assert finite_number(value) == wanted


def test_whole_numbers_stay_whole_and_figures_may_be_infinite() -> None:
    assert repr(python_number(np.int64(42))) == "42"
    assert repr(python_number(True)) == "1"
    assert plain_number(np.float32("inf")) == math.inf
    assert numbers_of({"a": np.float32(0.5), "b": "x", "c": None, "d": math.inf}) == {
        "a": 0.5,
        "d": math.inf,
    }
