"""Reads many keys at one revision, page by page.

For etcd_store.py and etcd_watch.py. A page has up to 500 keys, so that no single request blocks
etcd for long; all pages of a listing have the revision of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

from realsys.name_resolve.etcd.etcd_client import EtcdClient
from realsys.name_resolve.etcd.etcd_keys import (
    PAGE_KEYS,
    below,
    entry,
    found_by,
    from_etcd,
    is_below_any,
    is_marker,
    read_operation,
    to_etcd,
)
from realsys.name_resolve.store import MAX_TXN_OPS, Entry

PREFIXES_AT_ONCE = MAX_TXN_OPS // 2


class _ReadOptions(TypedDict):
    revision: int
    keys_only: bool


def entries_under(
    client: EtcdClient, prefixes: Sequence[str], *, revision: int = 0
) -> tuple[list[Entry], int]:
    """Returns the entries at and below the prefixes, sorted by key, and the revision they were read
    at.

    Args:
        revision: to read at; 0 is the newest. Raises Compacted, FutureRevision.
    """
    found, revision = _under(client, prefixes, revision=revision, keys_only=False)
    return sorted((entry(kv) for kv in found), key=lambda e: e.key), revision


def revisions_under(
    client: EtcdClient, prefixes: Sequence[str], *, revision: int = 0
) -> tuple[dict[str, int], int]:
    """Returns the keys of ``entries_under`` with their revisions, without the values."""
    found, revision = _under(client, prefixes, revision=revision, keys_only=True)
    return {from_etcd(kv.key): kv.mod_revision for kv in found}, revision


def entries_of(client: EtcdClient, keys: Sequence[str]) -> tuple[dict[str, Entry], int]:
    """Returns those of the keys that exist, and the revision they were read at."""
    found: dict[str, Entry] = {}
    revision = 0
    for start in range(0, len(keys), MAX_TXN_OPS):
        page = keys[start : start + MAX_TXN_OPS]
        reply = client.read([read_operation(to_etcd(key), revision=revision) for key in page])
        revision = revision or reply.header.revision
        found |= {from_etcd(kv.key): entry(kv) for kv in found_by(reply) if kv is not None}
    return found, revision


def _under(
    client: EtcdClient, prefixes: Sequence[str], *, revision: int, keys_only: bool
) -> tuple[list[Any], int]:
    found: list[Any] = []
    wanted = frozenset(prefixes)
    # A prefix below another would be listed twice.
    tops = [p for p in sorted(wanted) if not is_below_any(p.rpartition("/")[0], wanted)]
    for first in range(0, len(tops), PREFIXES_AT_ONCE):
        ranges = [below(prefix) for prefix in tops[first : first + PREFIXES_AT_ONCE]]
        reads = []
        for start, end in ranges:
            options = _ReadOptions(revision=revision, keys_only=keys_only)
            reads.append(read_operation(start[:-1], **options))  # itself, without the "/"
            reads.append(read_operation(start, end, limit=PAGE_KEYS, **options))
        reply = client.read(reads)
        revision = revision or reply.header.revision
        pages = [response.response_range for response in reply.responses]
        for itself, page, (_, end) in zip(pages[::2], pages[1::2], ranges, strict=True):
            found += itself.kvs
            found += _pages(client, page, end, revision=revision, keys_only=keys_only)
    return [kv for kv in found if not is_marker(kv.key)], revision


def _pages(
    client: EtcdClient, page: Any, end: bytes, *, revision: int, keys_only: bool
) -> Iterator[Any]:
    yield from page.kvs
    while page.more:
        after = page.kvs[-1].key + b"\0"
        page = client.range(after, end, revision=revision, limit=PAGE_KEYS, keys_only=keys_only)
        yield from page.kvs
