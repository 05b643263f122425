"""Which finished prompts may go first, if all must be trained by their due step (pure).

Trained are ``batch_size`` prompts a step. A set of prompts can meet its due steps if and only if, for every
step s, those due by s are no more than the batches until s hold: unit jobs with deadlines (Jackson 1955).
Used by the ledger's policy ``window``; knows prompts as numbers, nothing of versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence


def fits(dues: Iterable[int], *, next_step: int, batch_size: int) -> bool:
    """Whether all can be trained by their due steps, beginning with ``next_step``."""
    return not any(n > 0 for n in shortfalls(dues, step=next_step - 1, batch_size=batch_size))


def shortfalls(dues: Iterable[int], *, step: int, batch_size: int) -> list[int]:
    """How many of those due by ``step``, by ``step + 1``, … can't wait until after ``step``.

    Entry k counts those due by ``step + k`` beyond what k later batches hold; may be negative.
    """
    counts = Counter(dues)
    late = sum(n for due, n in counts.items() if due < step)
    result, so_far = [], late
    for k in range(max([step, *counts]) - step + 1):
        so_far += counts[step + k]
        result.append(so_far - k * batch_size)
    return result


def first_room(
    dues: Collection[int], *, earliest: int, latest: int, next_step: int, batch_size: int
) -> int | None:
    """The first due step in ``earliest`` … ``latest`` that one more may have; None: not one."""
    for due in range(earliest, latest + 1):
        if fits((*dues, due), next_step=next_step, batch_size=batch_size):
            return due
    return None


def choose(
    finished: Mapping[int, int], running: Mapping[int, int], *, step: int, batch_size: int
) -> tuple[int, ...] | None:
    """The first finished ones that make a batch for ``step`` and leave the others time.

    Args:
        finished: number → due step (``step`` or later), in order of arrival.
        running: number → due step, if it is as old as it may be.
    Returns:
        ``batch_size`` numbers in order of arrival; None if too few have finished, or such that must
        be in this batch (``must_wait_for``).
    """
    if len(finished) < batch_size or must_wait_for(
        finished, running, step=step, batch_size=batch_size
    ):
        return None
    needed = shortfalls((*finished.values(), *running.values()), step=step, batch_size=batch_size)
    picked: list[int] = []
    for number, due in finished.items():
        room = batch_size - len(picked)
        if room == 0:
            break
        # Those due earlier must keep as many places as they still need.
        if all(n < room for n in needed[: due - step]):
            picked.append(number)
            for k in range(due - step, len(needed)):
                needed[k] -= 1
    return tuple(picked)


def must_wait_for(
    finished: Mapping[int, int], running: Mapping[int, int], *, step: int, batch_size: int
) -> Sequence[int]:
    """Running ones without which no batch for ``step`` leaves the others time, ascending.

    Some of them have to finish, not always all.
    """
    needed = shortfalls((*finished.values(), *running.values()), step=step, batch_size=batch_size)
    counts, there = Counter(finished.values()), 0
    for k, least in enumerate(needed):
        there += counts[step + k]
        if there < least:
            return sorted(number for number, due in running.items() if due <= step + k)
    return ()
