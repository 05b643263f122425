"""Tells an explicit delete from a lease expiry; etcd reports both as DELETE.

For etcd_watch.py. Every explicit delete also writes the trial's marker in the same revision
(transaction.py); a lease that expires does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realsys.name_resolve.etcd.etcd_client import EtcdClient
from realsys.name_resolve.etcd.etcd_failures import Compacted
from realsys.name_resolve.etcd.etcd_keys import (
    found_by,
    from_etcd,
    marker_of,
    read_operation,
    to_etcd,
)
from realsys.name_resolve.store import MAX_TXN_OPS, EventKind

Marked = tuple[str, int]  # a marker key, and the revision at which it is read


def ending_kinds(client: EtcdClient, changes: Sequence[Any]) -> dict[tuple[str, int], EventKind]:
    """Returns DELETE or EXPIRE for each (key, revision) of etcd's deletion events.

    Deletions whose history has been compacted count as DELETE.

    What has been compacted meanwhile can't be told any more and counts as DELETE.
    """
    kinds, asked = {}, {}
    for change in changes:
        key, revision = from_etcd(change.kv.key), change.kv.mod_revision
        kinds[key, revision] = EventKind.DELETE
        if change.prev_kv.lease:
            asked[key, revision] = (marker_of(key), revision)
    signed = _signed(client, sorted(set(asked.values())))
    for ended, marked in asked.items():
        if not signed[marked]:
            kinds[ended] = EventKind.EXPIRE
    return kinds


def _signed(client: EtcdClient, asked: Sequence[Marked]) -> dict[Marked, bool]:
    """Returns whether each marker was written in exactly its revision."""
    signed: dict[Marked, bool] = {}
    for start in range(0, len(asked), MAX_TXN_OPS):
        page = asked[start : start + MAX_TXN_OPS]
        reads = [read_operation(to_etcd(marker), revision=revision) for marker, revision in page]
        try:
            found = found_by(client.read(reads))
        except Compacted:
            if len(page) > 1:  # some of them may still be kept
                middle = start + len(page) // 2
                for half in (asked[start:middle], asked[middle : start + len(page)]):
                    signed |= _signed(client, half)
            else:
                signed[page[0]] = True
            continue
        for (marker, revision), kv in zip(page, found, strict=True):
            signed[marker, revision] = kv is not None and kv.mod_revision == revision
    return signed
