"""The calls that a store makes to etcd, each with a deadline: about ten, and no more are needed.

For etcd_store.py, transaction.py, etcd_watch.py and etcd_lease.py. Requests and replies are etcd's own
messages (protocol.py). Reads are tried again until the deadline; a transaction is not (transaction.py does,
after it has looked what became of the first). Thread-safe; not to be used across a fork.
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
    """One etcd, of one or several members. ``call_timeout_s`` is for a whole call, all tries."""

    def __init__(self, access: EtcdAccess, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.access, self.where, self.call_timeout_s = access, access.where, call_timeout_s
        self._channels = Channels(access)
        self._lock, self._newest = threading.Lock(), 0

    @property
    def newest_revision(self) -> int:
        """The highest revision that any reply has told."""
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
        """One page of the keys from ``key`` to before ``end``; of ``key`` alone without an end."""
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
        """Several reads at one revision: a transaction that writes nothing."""
        request = protocol.TxnRequest(success=operations)
        return self._call(protocol.TXN, request, deadline_s=deadline_s)

    def transaction(self, request: Any, *, deadline_s: float) -> Any:
        """Sends it once. Raises Unsure when there is no telling whether it happened."""
        return self._call(protocol.TXN, request, deadline_s=deadline_s, resend=False)

    def grant(self, lease: int, ttl_s: int) -> Any:
        """Raises LeaseExists, also after a first try of ours whose reply was lost."""
        return self._call(protocol.GRANT, protocol.LeaseGrantRequest(ID=lease, TTL=ttl_s))

    def keep_alive(self, lease: int, *, timeout_s: float) -> Any:
        """The reply's TTL is 0 when there is no such lease (any more)."""
        deadline_s = time.monotonic() + timeout_s
        request = protocol.LeaseKeepAliveRequest(ID=lease)
        return self._call(protocol.KEEP_ALIVE, request, deadline_s=deadline_s)

    def revoke(self, lease: int) -> Any:
        """Raises LeaseLost when there is no such lease."""
        return self._call(protocol.REVOKE, protocol.LeaseRevokeRequest(ID=lease))

    def time_to_live(self, lease: int, *, keys: bool = False) -> Any:
        """The reply's TTL is -1 when there is no such lease."""
        request = protocol.LeaseTimeToLiveRequest(ID=lease, keys=keys)
        return self._call(protocol.TIME_TO_LIVE, request)

    def watch(self, key: bytes, end: bytes, *, from_revision: int) -> Stream:
        """Starts it; nothing is known of its fate before its first reply."""
        create = protocol.WatchCreateRequest(
            key=key, range_end=end, start_revision=from_revision, prev_kv=True
        )
        request = protocol.WatchRequest(create_request=create)
        return self._channels.stream(protocol.WATCH, request, deadline_s=self.deadline_s())

    def status(self) -> Any:
        """Of the member that answers: version, database size, leader."""
        return self._call(protocol.STATUS, protocol.StatusRequest())

    def members(self) -> Any:
        return self._call(protocol.MEMBERS, protocol.MemberListRequest())

    def deadline_s(self) -> float:
        """On ``time.monotonic()``, for a call that begins now."""
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
