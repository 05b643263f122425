"""Feasibility of training prompts by their deadline steps, and the choice of batches (pure).

Each step trains ``batch_size`` prompts. A set of prompts can meet its deadline steps if and only if, for
every step s, those due by s fit into the batches until s: unit jobs with deadlines (Jackson 1955). Used by
the ledger's policy ``window``; prompts are numbers here, versions don't appear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence


def fits(dues: Iterable[int], *, next_step: int, batch_size: int) -> bool:
    """True if all can be trained by their deadline steps, starting with ``next_step``."""
    return not any(n > 0 for n in shortfalls(dues, step=next_step - 1, batch_size=batch_size))


def shortfalls(dues: Iterable[int], *, step: int, batch_size: int) -> list[int]:
    """Counts how many of those due by ``step``, by ``step + 1``, … can't be trained after ``step``.

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
    """Returns the first deadline step in ``earliest`` … ``latest`` for one more prompt; None if
    there is none.
    """
    for due in range(earliest, latest + 1):
        if fits((*dues, due), next_step=next_step, batch_size=batch_size):
            return due
    return None


def choose(
    finished: Mapping[int, int], running: Mapping[int, int], *, step: int, batch_size: int
) -> tuple[int, ...] | None:
    """Chooses the earliest finished prompts that form a batch for ``step`` and leave the others
    feasible.

    Args:
        finished: number → deadline step (``step`` or later), in order of arrival.
        running: number → deadline step for the oldest allowed weights.
    Returns:
        ``batch_size`` numbers in order of arrival; None if too few have finished, or running ones must
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
        # Prompts with earlier deadlines must keep the places that they need.
        if all(n < room for n in needed[: due - step]):
            picked.append(number)
            for k in range(due - step, len(needed)):
                needed[k] -= 1
    return tuple(picked)


def must_wait_for(
    finished: Mapping[int, int], running: Mapping[int, int], *, step: int, batch_size: int
) -> Sequence[int]:
    """Lists running prompts without which no batch for ``step`` leaves the others feasible, ascending.

    Some of them have to finish, not always all.
    """
    needed = shortfalls((*finished.values(), *running.values()), step=step, batch_size=batch_size)
    counts, there = Counter(finished.values()), 0
    for k, least in enumerate(needed):
        there += counts[step + k]
        if there < least:
            return sorted(number for number, due in running.items() if due <= step + k)
    return ()
