"""Applies a write exactly once: if no reply arrives, checks whether it happened before resending
it.

For etcd_store.py. A transaction is identified by what it wrote: the value and the
lease of its first put. If another process could have written the same (a deletion, or a condition
without a lease), it also writes a random name of its own to the trial's marker (etcd_keys.py) in
the same revision. It is searched for in the key's history, back to the newest revision before it
was sent.

The marker has a second reader: etcd_watch.py checks it to tell an explicit delete from a lease
expiry.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from realsys.api.errors import StoreUnavailable
from realsys.name_resolve.etcd import protocol
from realsys.name_resolve.etcd.channels import Unsure
from realsys.name_resolve.etcd.etcd_client import EtcdClient
from realsys.name_resolve.etcd.etcd_failures import Compacted
from realsys.name_resolve.etcd.etcd_keys import (
    delete_operation,
    marker_of,
    put_operation,
    to_etcd,
)
from realsys.name_resolve.store import Put

MAX_LOOKS_BACK = 64  # values of one key searched since the first attempt
RESEND_AFTER_S = 0.05


class TransactionOutcome(NamedTuple):
    """The result of a transaction. ``responses`` is None if the reply was lost and the writes were
    found."""

    happened: bool
    revision: int
    responses: Sequence[Any] | None


class Transaction:
    """One transaction of a store; ``run`` it once.

    Args:
        conditions: etcd's Compares.
        ranges: to delete, as (key, end); an empty end for a single key.
        deletes_of: one key of each trial in which something is deleted.
        otherwise: reads to answer if a condition does not hold.
    """

    def __init__(
        self,
        client: EtcdClient,
        *,
        conditions: Sequence[Any] = (),
        puts: Sequence[Put] = (),
        ranges: Sequence[tuple[bytes, bytes]] = (),
        deletes_of: Sequence[str] = (),
        otherwise: Sequence[Any] = (),
    ) -> None:
        self._client = client
        name = secrets.token_hex(8).encode()
        markers = {marker_of(key) for key in deletes_of}
        is_plain = not conditions or any(put.lease is not None for put in puts)
        if puts and not is_plain:
            markers.add(marker_of(puts[0].key))
        signed = [Put(marker, name) for marker in sorted(markers)]
        written = [*signed, *puts]
        self._trace = put_operation(written[0]).request_put if written else None
        self._request = protocol.TxnRequest(
            compare=conditions,
            # Deletions first: within a revision, watchers get events in this order.
            success=[
                *(delete_operation(key, end) for key, end in ranges),
                *(put_operation(put) for put in (*puts, *signed)),
            ],
            failure=otherwise,
        )

    def run(self) -> TransactionOutcome:
        """Runs it. Raises StoreUnavailable if no server answers or the outcome can't be determined."""
        client, deadline_s = self._client, self._client.deadline_s()
        before, was_lost = client.newest_revision, False
        while True:
            try:
                reply = client.transaction(self._request, deadline_s=deadline_s)
            except Unsure as error:
                was_lost = True
                if found := self._find(before, deadline_s):
                    return TransactionOutcome(True, found, None)
                if time.monotonic() + RESEND_AFTER_S > deadline_s:
                    raise self._unknown(error.details) from error
                time.sleep(RESEND_AFTER_S)
                continue
            except StoreUnavailable as error:
                if was_lost:
                    raise self._unknown(error.what) from error
                raise
            # A condition may fail now because the first attempt succeeded.
            if was_lost and not reply.succeeded and (found := self._find(before, deadline_s)):
                return TransactionOutcome(True, found, None)
            return TransactionOutcome(reply.succeeded, reply.header.revision, reply.responses)

    def _find(self, before: int, deadline_s: float) -> int | None:
        """Returns the revision of this transaction's writes; None if it is not after ``before``."""
        if self._trace is None:
            return None  # nothing is written: resending is safe
        key, revision = self._trace.key, 0
        try:
            for _ in range(MAX_LOOKS_BACK):
                kvs = self._client.range(key, revision=revision, deadline_s=deadline_s).kvs
                if not kvs or kvs[0].mod_revision <= before:
                    return None
                if (kvs[0].value, kvs[0].lease) == (self._trace.value, self._trace.lease):
                    return int(kvs[0].mod_revision)
                revision = kvs[0].mod_revision - 1
        except Compacted:
            pass
        except StoreUnavailable as error:
            raise self._unknown(error.what) from error
        raise self._unknown("its key was written too often since")

    def _unknown(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"it is unknown whether a write happened: {why}",
            where=f"key {self._key_text()} in {self._client.where}",
            fix="read the key when etcd answers again, and then decide",
        )

    def _key_text(self) -> str:
        operations = self._request.success
        if not operations:
            return "none"
        first = operations[0]
        key = first.request_put.key or first.request_delete_range.key
        return repr(key.decode(errors="backslashreplace")[1:])


def delete_keys(
    client: EtcdClient, keys: Sequence[str], conditions: Sequence[Any]
) -> TransactionOutcome:
    """Deletes keys if the conditions hold, marked as an explicit delete."""
    ranges = [(to_etcd(key), b"") for key in keys]
    return Transaction(client, conditions=conditions, ranges=ranges, deletes_of=keys).run()
