"""Which tensors a worker gets from whom before a call (pure).

Every needed (key, datapoint) that the worker does not hold is taken from one of its owners, the one
that was asked for the fewest bytes so far, so that no owner sends more than it must. Nothing is sent
twice and nothing passes through the master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from realsys.api.errors import DataError

Source = tuple[int, str, tuple[str, ...]]  # worker index, key, ids


def plan_transfers(
    *,
    consumer: int,
    keys: Iterable[str],
    ids: Sequence[str],
    owners: Callable[[str, str], frozenset[int]],
    num_bytes: Callable[[str, str], int],
) -> tuple[Source, ...]:
    """What ``consumer`` must fetch.

    Args:
        consumer: index of the model worker that runs the call.
        owners: (key, id) → workers that hold it.
        num_bytes: (key, id) → size.
    Returns:
        (worker, key, ids) sorted by worker and key; ids in the order given.
    Raises:
        DataError: nobody holds a tensor.
    """
    asked_bytes: dict[int, int] = {}
    wanted: dict[tuple[int, str], list[str]] = {}
    for key in keys:
        for name in ids:
            holders = owners(key, name)
            if consumer in holders:
                continue
            if not holders:
                raise DataError(
                    f"no worker holds {key!r} of datapoint {name!r}",
                    where="transfer plan",
                    fix="report this as a bug: a call ran before its inputs existed",
                )
            source = min(holders, key=lambda w: (asked_bytes.get(w, 0), w))
            asked_bytes[source] = asked_bytes.get(source, 0) + num_bytes(key, name)
            wanted.setdefault((source, key), []).append(name)
    return tuple((w, key, tuple(found)) for (w, key), found in sorted(wanted.items()))
