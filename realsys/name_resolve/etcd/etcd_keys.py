"""Translation between the store's keys and etcd's, and between its operations and etcd's messages.

A key is stored as "/" + key. A subtree is the key itself and the range from key + "/" to key + "0",
the character after "/". Each trial also has a marker, a key with a NUL in it, which the store's own
keys can't contain: transactions write their identity there (transaction.py), and listings skip it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from realsys.name_resolve.etcd import protocol
from realsys.name_resolve.store import MIN_CLEAR_SEGMENTS, Compare, Entry, Put

MARKER = "\0by"
PAGE_KEYS = 500
_EQUAL = protocol.Compare.CompareResult.Value("EQUAL")
_GREATER = protocol.Compare.CompareResult.Value("GREATER")
_target = protocol.Compare.CompareTarget.Value
_MOD, _CREATE, _VALUE = _target("MOD"), _target("CREATE"), _target("VALUE")
_LEASE = _target("LEASE")


def to_etcd(key: str) -> bytes:
    return b"/" + key.encode()


def from_etcd(key: bytes) -> str:
    return key[1:].decode(errors="backslashreplace")


def below(key: str) -> tuple[bytes, bytes]:
    """Returns the range of all keys below ``key``, without ``key`` itself."""
    return to_etcd(key) + b"/", to_etcd(key) + b"0"


def is_below_any(key: str, prefixes: frozenset[str]) -> bool:
    """Returns whether ``key`` is one of the prefixes or below one. Fast for thousands of prefixes."""
    while key not in prefixes:
        key, slash, _ = key.rpartition("/")
        if not slash:
            return False
    return True


def is_marker(key: bytes) -> bool:
    return b"\0" in key


def marker_of(key: str) -> str:
    """Returns the marker of the trial that ``key`` belongs to; a shorter key has its own."""
    return "/".join(key.split("/")[:MIN_CLEAR_SEGMENTS]) + MARKER


def entry(found: Any) -> Entry:
    """Converts etcd's KeyValue ``found``."""
    return Entry(
        key=from_etcd(found.key),
        value=found.value,
        revision=found.mod_revision,
        version=found.version,
        lease_id=lease_text(found.lease) if found.lease else None,
    )


def lease_text(lease: int) -> str:
    return f"{lease:016x}"


def lease_number(lease_id: str) -> int:
    """Parses a lease id; returns 0, which no lease has, for text that is not one."""
    if not re.fullmatch(r"[0-9a-f]{1,16}", lease_id):
        return 0
    number = int(lease_id, 16)
    return number if number < 2**63 else 0


def compare(condition: Compare) -> Any:
    key = to_etcd(condition.key)
    if condition.value is not None:
        return protocol.Compare(key=key, target=_VALUE, result=_EQUAL, value=condition.value)
    # An absent key has revision 0, in etcd as in this store.
    revision = condition.revision
    return protocol.Compare(key=key, target=_MOD, result=_EQUAL, mod_revision=revision)


def exists(key: str) -> Any:
    return protocol.Compare(key=to_etcd(key), target=_CREATE, result=_GREATER, create_revision=0)


def is_under_lease(key: bytes, lease: int) -> Any:
    return protocol.Compare(key=key, target=_LEASE, result=_EQUAL, lease=lease)


def put_operation(put: Put) -> Any:
    lease = lease_number(put.lease.id) if put.lease is not None else 0
    request = protocol.PutRequest(key=to_etcd(put.key), value=put.value, lease=lease)
    return protocol.RequestOp(request_put=request)


def delete_operation(key: bytes, end: bytes = b"") -> Any:
    request = protocol.DeleteRangeRequest(key=key, range_end=end)
    return protocol.RequestOp(request_delete_range=request)


def read_operation(
    key: bytes, end: bytes = b"", *, revision: int = 0, limit: int = 0, keys_only: bool = False
) -> Any:
    request = protocol.RangeRequest(
        key=key, range_end=end, revision=revision, limit=limit, keys_only=keys_only
    )
    return protocol.RequestOp(request_range=request)


def found_by(reply: Any) -> list[Any]:
    """Returns what each read of a read transaction found; None for an absent key."""
    pages: Sequence[Any] = [response.response_range.kvs for response in reply.responses]
    return [page[0] if page else None for page in pages]
