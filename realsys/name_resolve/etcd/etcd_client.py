"""The seven RPCs that the store makes to etcd, each with a deadline.

For etcd_store.py, transaction.py and etcd_watch.py. Requests and replies are etcd's
own messages (protocol.py). Reads are retried until the deadline; a transaction is not
(transaction.py retries it after it has checked what became of the first attempt). Thread-safe; not
to be used across a fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from realsys.name_resolve.etcd import protocol
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.etcd.channels import Channels, Stream

CALL_TIMEOUT_S = 5.0


class EtcdClient:
    """A client of one etcd of one or several members. ``call_timeout_s`` bounds a whole call with
    all its attempts."""

    def __init__(self, access: EtcdAccess, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.access, self.where, self.call_timeout_s = access, access.where, call_timeout_s
        self._channels = Channels(access)
        self._lock, self._newest = threading.Lock(), 0

    @property
    def newest_revision(self) -> int:
        """The highest revision seen in any reply."""
        return self._newest

    def range(
        self,
        key: bytes,
        end: bytes = b"",
        *,
        revision: int = 0,
        limit: int = 0,
        keys_only: bool = False,
        count_only: bool = False,
        deadline_s: float | None = None,
    ) -> Any:
        """Reads one page of the keys in [``key``, ``end``), or ``key`` alone without ``end``."""
        request = protocol.RangeRequest(
            key=key,
            range_end=end,
            revision=revision,
            limit=limit,
            keys_only=keys_only,
            count_only=count_only,
        )
        return self._call(protocol.RANGE, request, deadline_s=deadline_s)

    def read(self, operations: Sequence[Any], *, deadline_s: float | None = None) -> Any:
        """Runs several reads at one revision, as a transaction without writes."""
        request = protocol.TxnRequest(success=operations)
        return self._call(protocol.TXN, request, deadline_s=deadline_s)

    def transaction(self, request: Any, *, deadline_s: float) -> Any:
        """Sends the transaction once. Raises Unsure if it is unknown whether it happened."""
        return self._call(protocol.TXN, request, deadline_s=deadline_s, resend=False)

    def grant(self, lease: int, ttl_s: int) -> Any:
        """Grants a lease. Raises LeaseExists, also if an earlier attempt's reply was lost."""
        return self._call(protocol.GRANT, protocol.LeaseGrantRequest(ID=lease, TTL=ttl_s))

    def keep_alive(self, lease: int, *, timeout_s: float) -> Any:
        """Renews a lease. The reply's TTL is 0 if the lease does not exist (any more)."""
        deadline_s = time.monotonic() + timeout_s
        request = protocol.LeaseKeepAliveRequest(ID=lease)
        return self._call(protocol.KEEP_ALIVE, request, deadline_s=deadline_s)

    def revoke(self, lease: int) -> Any:
        """Revokes a lease. Raises LeaseLost if it does not exist."""
        return self._call(protocol.REVOKE, protocol.LeaseRevokeRequest(ID=lease))

    def time_to_live(self, lease: int, *, keys: bool = False) -> Any:
        """Reads a lease's remaining time. The reply's TTL is -1 if it does not exist."""
        request = protocol.LeaseTimeToLiveRequest(ID=lease, keys=keys)
        return self._call(protocol.TIME_TO_LIVE, request)

    def watch(self, key: bytes, end: bytes, *, from_revision: int) -> Stream:
        """Starts a watch; whether etcd accepted it is known with its first reply."""
        create = protocol.WatchCreateRequest(
            key=key, range_end=end, start_revision=from_revision, prev_kv=True
        )
        request = protocol.WatchRequest(create_request=create)
        return self._channels.stream(protocol.WATCH, request, deadline_s=self.deadline_s())

    def deadline_s(self) -> float:
        """Returns the deadline of a call that begins now, on ``time.monotonic()``."""
        return time.monotonic() + self.call_timeout_s

    def close(self) -> None:
        self._channels.close()

    def _call(
        self, method: Any, request: Any, *, deadline_s: float | None = None, resend: bool = True
    ) -> Any:
        deadline_s = self.deadline_s() if deadline_s is None else deadline_s
        reply = self._channels.call(method, request, deadline_s=deadline_s, resend=resend)
        if reply.header.revision > self._newest:
            with self._lock:
                self._newest = max(self._newest, reply.header.revision)
        return reply
