"""What every name-resolution store guarantees: calls, values and rules for keys.

For everything that registers or looks up a worker; the stores (memory_store.py, file_store.py,
etcd/) implement it and one conformance suite tests them against it. Calls are synchronous and
thread-safe. Nothing here opens a file or a socket or knows which keys exist (key_table.py does).

Revisions count the writes of a whole store: each successful write takes the next one, and a
transaction takes one for all its keys. They order events and fence compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, Self

import msgspec

from realsys.api.errors import KeyNotFound, StoreError

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 1024 * 1024  # etcd refuses requests above 1.5 MiB; one limit for all stores
# A trial's root, realsys/v1/<cluster>/<user>/<experiment>/<trial>, is the widest prefix that may be
# cleared: one level up, a typing error would delete the user's other trials.
MIN_CLEAR_SEGMENTS = 6
MAX_TXN_OPS = 120  # conditions, and writes, of one transaction: etcd refuses more than 128


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One key as it was read."""

    key: str
    value: bytes  # exactly the bytes that were written
    revision: int  # of the write that made this value
    version: int  # writes to this key since it was created: 1, 2, ...
    lease_id: str | None = None  # the key is deleted when this lease ends


class EventKind(StrEnum):
    """How a key changed."""

    PUT = "put"
    DELETE = "delete"  # deleted explicitly, or its lease was revoked
    EXPIRE = "expire"  # its lease expired or its holder died


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one key. ``value`` is the new one, or the last one if the key was deleted."""

    kind: EventKind
    key: str
    value: bytes
    revision: int


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction. Create it with one of the three functions below."""

    key: str
    revision: int | None = None  # 0 means absent
    value: bytes | None = None

    @classmethod
    def absent(cls, key: str) -> Self:
        return cls(key, revision=0)

    @classmethod
    def at_revision(cls, key: str, revision: int) -> Self:
        return cls(key, revision=revision)

    @classmethod
    def holds(cls, key: str, value: bytes) -> Self:
        return cls(key, value=value)


class Lease(Protocol):
    """A claim to be alive that must be renewed. Keys bound to it are deleted when it ends."""

    @property
    def id(self) -> str: ...
    @property
    def ttl_s(self) -> float: ...

    def keep_alive(self) -> None:
        """Renews for another ``ttl_s``. Raises LeaseLost if it has ended, which is final."""

    def revoke(self) -> None:
        """Ends the lease and deletes its keys (DELETE events). Does nothing on an ended lease."""


class Put(msgspec.Struct, frozen=True):
    """One write of a transaction; replaces an existing value."""

    key: str
    value: bytes
    lease: Lease | None = None


class Watch(Protocol):
    """Changes below some prefixes, in order of revision. A block with it closes it."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Returns the next events, oldest first; ``[]`` if none arrived in ``timeout_s``.

        An unavailable store is not an error here: nothing arrives until it is back, then everything
        that happened meanwhile.
        """

    @property
    def is_connected(self) -> bool:
        """Whether the store answers, so that the absence of events means that nothing happened."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class NameResolve(Protocol):
    """The store. A prefix names a key and everything below it, never a neighbour (run1, run10)."""

    def add(
        self, key: str, value: bytes, *, lease: Lease | None = None, replace: bool = False
    ) -> int:
        """Writes a key and returns the revision; fails if it exists, unless ``replace``.

        Raises:
            KeyExists: the key exists and ``replace`` is off; shows a short value of its holder.
            LeaseLost: ``lease`` has ended.
        """

    def get(self, key: str) -> Entry:
        """Reads a key. Raises KeyNotFound."""

    def get_subtree(self, prefix: str) -> list[Entry]:
        """Reads ``prefix`` itself, if it has a value, and all keys below, sorted by key."""

    def find_subtree(self, prefix: str) -> list[str]:
        """Returns the keys of ``get_subtree``."""

    def delete(self, key: str, *, missing_ok: bool = False) -> None:
        """Deletes a key. Raises KeyNotFound unless ``missing_ok``."""

    def clear_subtree(self, prefix: str) -> int:
        """Deletes ``prefix`` and all keys below; returns how many. Refuses a prefix above a trial."""

    def wait(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        describe_missing: Callable[[list[str]], str] | None = None,
    ) -> dict[str, bytes]:
        """Blocks until all keys exist at the same time; returns their values.

        Args:
            describe_missing: gets the missing keys, returns an explanation for the user.
        Raises:
            WaitTimeout: names the missing keys (at most some of them) and the time waited.
        """

    def watch(
        self, *prefixes: str, from_revision: int | None = None, judges_leases: bool = True
    ) -> Watch:
        """Watches the prefixes from now on, or from ``from_revision`` (inclusive).

        Without ``judges_leases``, a lease's expiry is an event only once another process has noticed it:
        on a store without a server that avoids reading each lease repeatedly.

        To miss nothing: ``r = store.revision()``, list, then watch from ``r + 1``. Each key's last
        state always arrives; a watcher that lags by thousands of events gets the difference instead of
        every change between.
        """

    def revision(self) -> int:
        """Returns the revision of the store's last write; a new store has 0, or 1 on etcd."""

    def grant(self, ttl_s: float) -> Lease:
        """Grants a lease that ends ``ttl_s`` seconds after its last renewal.

        A store with whole seconds and a minimum TTL may grant more: the lease's own ``ttl_s`` is
        what was granted.
        """

    def renewed_ago_s(self, lease_id: str) -> float | None:
        """Returns roughly how long ago a lease was renewed, in seconds; None if unknown.

        For display only: it may compare the clocks of two hosts.
        """

    def transaction(
        self, compares: Sequence[Compare], *, puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> bool:
        """Applies all writes in one revision if every condition holds; otherwise writes nothing and
        returns False.

        Deleting an absent key is allowed. At most MAX_TXN_OPS conditions, and as many writes.
        Raises LeaseLost as ``add`` does.
        """

    def close(self) -> None:
        """Frees files and memory. Leases are not revoked: their holders revoke them first."""


def find(store: NameResolve, key: str) -> Entry | None:
    """Reads a key; None if it is missing."""
    try:
        return store.get(key)
    except KeyNotFound:
        return None


def canonical(key: str) -> str:
    """Returns ``key`` if it is valid: segments between single slashes, none of them special."""
    if not isinstance(key, str):
        raise _bad_key(key, "is not a string")
    return _checked(key)


def check_value(key: str, value: bytes) -> bytes:
    """Returns ``value`` if it is valid: bytes, and not too long."""
    if not isinstance(value, bytes):
        raise StoreError(
            f"value is {type(value).__name__}, a store holds bytes",
            where=f"key {key!r}",
            fix="encode it, e.g. text.encode()",
        )
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(
            f"value has {len(value)} bytes, the limit is {MAX_VALUE_BYTES}",
            where=f"key {key!r}",
            fix="write it to a file of the trial and store the path",
        )
    return value


def check_clearable(prefix: str) -> str:
    """Returns ``prefix`` if clearing it can't reach beyond one trial."""
    prefix = canonical(prefix)
    if (num_segments := prefix.count("/") + 1) < MIN_CLEAR_SEGMENTS:
        raise StoreError(
            f"refused to clear a prefix of {num_segments} segments, "
            f"a trial's root has {MIN_CLEAR_SEGMENTS}",
            where=f"prefix {prefix!r}",
            fix="clear one trial at a time: TrialKeys(...).root",
        )
    return prefix


def check_prefixes(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Returns the prefixes of a watch if they are valid and there is at least one."""
    if not prefixes:
        raise StoreError("a watch without a prefix", where="watch", fix="name a key or a prefix")
    return tuple(canonical(prefix) for prefix in prefixes)


def is_under(key: str, prefix: str) -> bool:
    """Returns whether ``key`` is ``prefix`` or below it. Both must be canonical."""
    return key.startswith(prefix) and (len(key) == len(prefix) or key[len(prefix)] == "/")


@lru_cache(maxsize=4096)
def _checked(key: str) -> str:
    segments = key.split("/")
    if not key:
        raise _bad_key(key, "is empty")
    if not segments[0]:
        raise _bad_key(key, "is absolute")
    if "" in segments:
        raise _bad_key(key, "has an empty segment")
    if "." in segments or ".." in segments:
        raise _bad_key(key, "has a '.' or '..' segment")
    if "\0" in key:
        raise _bad_key(key, "has a NUL character")
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise _bad_key(key, "can't be written as UTF-8") from None
    if num_bytes > MAX_KEY_BYTES:
        raise _bad_key(key[:60] + "...", f"has {num_bytes} bytes, the limit is {MAX_KEY_BYTES}")
    return key


def _bad_key(key: object, why: str) -> StoreError:
    return StoreError(
        f"key {key!r} {why}",
        where="name resolution",
        fix="use segments between single slashes, as realsys.name_resolve.key_table makes them",
    )
