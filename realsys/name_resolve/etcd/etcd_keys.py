"""Which keys a store's keys are in etcd, and how etcd's messages are made of them and read.

A key is "/" + key there. A subtree is the key itself and the range from key + "/" to key + "0", the
character after "/". Beside the keys of each trial stands a marker, a key with a NUL in it, which no key
of ours can have: transactions write there who they are (transaction.py), and nobody lists it.
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
    """The range of everything below ``key``, without itself."""
    return to_etcd(key) + b"/", to_etcd(key) + b"0"


def is_below_any(key: str, prefixes: frozenset[str]) -> bool:
    """Whether ``key`` is one of the prefixes, or below one. Quick also for a thousand of them."""
    while key not in prefixes:
        key, slash, _ = key.rpartition("/")
        if not slash:
            return False
    return True


def is_marker(key: bytes) -> bool:
    return b"\0" in key


def marker_of(key: str) -> str:
    """The marker of the trial that ``key`` is of; for a shorter key, one of its own."""
    return "/".join(key.split("/")[:MIN_CLEAR_SEGMENTS]) + MARKER


def entry(found: Any) -> Entry:
    """Args: ``found`` is etcd's KeyValue."""
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
    """0 for what can't be a lease of etcd's, which no lease has."""
    if not re.fullmatch(r"[0-9a-f]{1,16}", lease_id):
        return 0
    number = int(lease_id, 16)
    return number if number < 2**63 else 0


def compare(condition: Compare) -> Any:
    key = to_etcd(condition.key)
    if condition.value is not None:
        return protocol.Compare(key=key, target=_VALUE, result=_EQUAL, value=condition.value)
    # A key that is not there has the revision 0 for etcd as for us.
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
    """What each read of a transaction of reads has found; None where nothing is."""
    pages: Sequence[Any] = [response.response_range.kvs for response in reply.responses]
    return [page[0] if page else None for page in pages]
