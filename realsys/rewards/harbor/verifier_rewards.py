"""Reads what a task's tests wrote: ``reward.json``, else ``reward.txt``, as Harbor reads them. Pure.

Tests run what a solution left, in their own box, so that this may write a file of the other name: one that
the tests don't name is not theirs.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from realsys.api.basics.bounded_files import parse_json
from realsys.rewards.sandbox.box_limits import BoxOutcome

FOLDER, OUTPUT = "/logs/verifier", "test-stdout.txt"
REWARD = "reward"
_JSON, _TEXT = "reward.json", "reward.txt"
_MOST_BYTES = 1 << 20  # of a file with rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskVerdict:
    """What the tests of a task came to.

    Attributes:
        rewards: by names; empty if the tests wrote none that counts.
        why: then, the reason. Harbor calls it an error of the trial, which counts 0 in its mean.
        output: of the tests.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    output: str = ""

    @property
    def reward(self) -> float:
        """The reward named so, else the mean of all; 0 if there is none."""
        return self.rewards.get(REWARD, fmean(self.rewards.values()) if self.rewards else 0.0)


def verdict_of(outcome: BoxOutcome, tests: bytes = b"") -> TaskVerdict:
    """Reads the verdict that tests left in ``/logs/verifier``, of which the outcome has an archive.

    Tests that a limit ended have none, whatever they wrote before.

    Args:
        tests: their files, as text or an archive that is not compressed.
    """
    files = _files(outcome.archive or b"")
    output = files.get(OUTPUT, b"").decode(errors="replace")
    status = outcome.exit_code if outcome.ended == "exit" else outcome.signal
    try:
        if status is None:
            raise ValueError("they did not come to their end")
        rewards = _rewards(files, [name for name in (_JSON, _TEXT) if name.encode() in tests])
    except (ValueError, OverflowError) as error:  # also of JSON, and of what is no number
        why = f"{error}; the tests ended with {outcome.ended}"
        return TaskVerdict(why=why if status is None else f"{why} {status}", output=output)
    return TaskVerdict(rewards=rewards, output=output)


def _rewards(files: Mapping[str, bytes], tests_name: Sequence[str]) -> dict[str, float]:
    """Raises ValueError: there are none that count."""
    names = [name for name in tests_name or (_JSON, _TEXT) if name in files]
    if not names:
        raise ValueError(f"there is no {' and no '.join(tests_name or (_JSON, _TEXT))}")
    if _JSON in names:
        found = parse_json(files[_JSON])
        named = found if isinstance(found, dict) else {REWARD: found}
    else:
        named = {REWARD: float(files[_TEXT])}
    if not named:
        raise ValueError("reward.json names no reward")
    for name, value in named.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"reward {name!r} is {value!r:.80}, no finite number")
    rewards = {str(name): float(value) for name, value in named.items()}
    if len(names) == len(tests_name) == 2 and TaskVerdict(rewards=rewards).reward != float(
        files[_TEXT]
    ):
        raise ValueError(f"{_JSON} and {_TEXT} differ: one of them may be the solution's")
    return rewards


def _files(archive: bytes) -> dict[str, bytes]:
    """Returns the regular files of a flat folder, by their names; none if it is no archive."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for member in opened:
                content = opened.extractfile(member) if member.isreg() else None
                if content is not None:
                    name = member.name.removeprefix(FOLDER[1:] + "/")
                    found[name] = content.read(_MOST_BYTES)
    except (tarfile.TarError, OverflowError, ValueError):
        pass
    return found
