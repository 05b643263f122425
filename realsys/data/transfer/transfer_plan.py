"""Plans which tensors a call's workers fetch from which workers before it runs (pure).

Every needed (key, datapoint) that a worker does not hold is fetched from the owner that sends the fewest
bytes so far, which balances the owners. Nothing is sent twice to a worker and nothing passes through the
master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from realsys.api.errors import DataError

Source = tuple[int, str, tuple[str, ...]]  # worker index, key, ids


def plan_redistribution(
    consumers: Mapping[int, Sequence[str]],
    *,
    keys: Iterable[str],
    owners: Callable[[str, str], frozenset[int]],
    num_bytes: Callable[[str, str], int],
    host_of: Callable[[int], object],
) -> dict[int, tuple[Source, ...]]:
    """Plans what every consumer of a call must fetch, for all of them together.

    Nothing that a consumer holds is moved, and nothing is sent to it twice, so no plan moves fewer
    bytes. Owners on the consumer's own host are preferred. Tensors with one owner are assigned first,
    then the largest first, each to the owner that sends the fewest bytes so far, to any consumer. The
    same arguments give the same plan.

    Args:
        consumers: model worker → the datapoints it computes on.
        keys: keys that the call reads.
        owners: (key, id) → workers that hold it now.
        num_bytes: (key, id) → size.
        host_of: worker → any value that identifies its host.
    Returns:
        For each consumer (worker, key, ids) sorted by worker and key; ids in the order given.
    Raises:
        DataError: no worker holds a tensor.
    """
    needs = list(_missing_tensors(consumers, list(dict.fromkeys(keys)), owners, host_of))
    sizes = [num_bytes(need.key, need.name) for need in needs]
    sender: dict[int, int] = {}  # position in needs → worker
    to_send = {worker: 0 for need in needs for worker in need.owners}
    for i in sorted(range(len(needs)), key=lambda i: (len(needs[i].owners) > 1, -sizes[i])):
        sender[i] = min(needs[i].owners, key=to_send.__getitem__)
        to_send[sender[i]] += sizes[i]

    wanted: dict[int, dict[tuple[int, str], list[str]]] = {consumer: {} for consumer in consumers}
    for i, need in enumerate(needs):
        wanted[need.consumer].setdefault((sender[i], need.key), []).append(need.name)
    return {
        consumer: tuple((w, key, tuple(names)) for (w, key), names in sorted(found.items()))
        for consumer, found in wanted.items()
    }


class _MissingTensor(NamedTuple):
    """A tensor that a consumer lacks, and the workers that can send it."""

    consumer: int
    key: str
    name: str
    owners: tuple[int, ...]  # ascending


def _missing_tensors(
    consumers: Mapping[int, Sequence[str]],
    keys: Sequence[str],
    owners: Callable[[str, str], frozenset[int]],
    host_of: Callable[[int], object],
) -> Iterator[_MissingTensor]:
    # Few distinct sets of owners, many tensors.
    near: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}
    for consumer, names in consumers.items():
        for key in keys:
            for name in dict.fromkeys(names):
                holders = owners(key, name)
                if consumer in holders:
                    continue
                if not holders:
                    raise _no_owner_error(key, name)
                if (consumer, holders) not in near:
                    here = host_of(consumer)
                    local = [w for w in holders if host_of(w) == here]
                    near[consumer, holders] = tuple(sorted(local or holders))
                yield _MissingTensor(consumer, key, name, near[consumer, holders])


def _no_owner_error(key: str, name: str) -> DataError:
    return DataError(
        f"no worker holds {key!r} of datapoint {name!r}",
        where="transfer plan",
        fix="report this as a bug: a call ran before its inputs existed",
    )
