"""What every name-resolution store promises: the calls, the values, the rules for keys.

For everything that registers or looks up a worker; the stores (memory_store.py, file_store.py, etcd/)
implement it and one conformance suite holds them to it. Calls are synchronous and thread-safe. Nothing here
opens a file or a socket, and nothing here knows which keys exist (key_table.py does).

Revisions count the writes of a whole store: each successful write takes the next one, and a
transaction takes one for all its keys. They order events and fence compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, Self

import msgspec

from realsys.api.errors import StoreError

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 1024 * 1024  # etcd refuses requests above 1.5 MiB; one limit for all stores
# A trial's root, realsys/v1/<cluster>/<user>/<experiment>/<trial>, is the widest thing anybody may
# clear: one more step up and a typing error takes the user's other trials with it.
MIN_CLEAR_SEGMENTS = 6
MAX_TXN_OPS = 120  # conditions, and writes, of one transaction: etcd refuses more than 128


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One key as it was read."""

    key: str
    value: bytes  # exactly the bytes that were written
    revision: int  # of the write that made this value
    version: int  # writes to this key since it was created: 1, 2, ...
    lease_id: str | None = None  # the key ends with this lease


class EventKind(StrEnum):
    PUT = "put"
    DELETE = "delete"  # somebody deleted the key or gave its lease back: a goodbye
    EXPIRE = "expire"  # its lease ran out or its holder died: no goodbye


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one key. ``value`` is the new one, or the last one when the key ended."""

    kind: EventKind
    key: str
    value: bytes
    revision: int


class Compare(msgspec.Struct, frozen=True):
    """A condition of a transaction. Make it with one of the three functions below."""

    key: str
    revision: int | None = None  # 0 means "not there"
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
    """A promise to be alive. Keys put under it end with it."""

    @property
    def id(self) -> str: ...
    @property
    def ttl_s(self) -> float: ...

    def keep_alive(self) -> None:
        """Renews for another ``ttl_s``. Raises LeaseLost when it is over: it never comes back."""

    def revoke(self) -> None:
        """Ends the lease and deletes its keys (DELETE events). Does nothing on an ended lease."""


class Put(msgspec.Struct, frozen=True):
    """One write of a transaction; replaces what was there."""

    key: str
    value: bytes
    lease: Lease | None = None


class Watch(Protocol):
    """Changes below some prefixes, in order of revision. Iterating ends when the watch is closed."""

    def poll(self, timeout_s: float) -> list[Event]:
        """The next events, oldest first; ``[]`` when none came in ``timeout_s``.

        A store that does not answer is no error here: nothing comes until it is back, and then
        everything that happened meanwhile.
        """

    @property
    def is_connected(self) -> bool:
        """Whether the store answers, so that no news means that nothing has happened."""

    def close(self) -> None: ...
    def __iter__(self) -> Iterator[Event]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...


class NameResolve(Protocol):
    """The store. A prefix names a key and everything below it, never a neighbour (run1, run10)."""

    def add(
        self, key: str, value: bytes, *, lease: Lease | None = None, replace: bool = False
    ) -> int:
        """Writes and returns the revision; exclusive unless ``replace``.

        Raises:
            KeyExists: the key is taken and ``replace`` is off; names a short value of the holder.
            LeaseLost: ``lease`` is over.
        """

    def get(self, key: str) -> Entry:
        """Raises KeyNotFound."""

    def get_subtree(self, prefix: str) -> list[Entry]:
        """``prefix`` itself if it has a value, and all keys below, sorted by key."""

    def find_subtree(self, prefix: str) -> list[str]:
        """The keys of ``get_subtree``."""

    def delete(self, key: str, *, missing_ok: bool = False) -> None:
        """Raises KeyNotFound unless ``missing_ok``."""

    def clear_subtree(self, prefix: str) -> int:
        """Deletes ``prefix`` and all below; returns how many. Refuses anything above a trial."""

    def wait(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        describe_missing: Callable[[list[str]], str] | None = None,
    ) -> dict[str, bytes]:
        """Blocks until all keys are there at once.

        Args:
            describe_missing: gets the missing keys, returns what to tell the user about them.
        Raises:
            WaitTimeout: names the missing keys (of very many some) and how long they were waited for.
        """

    def watch(
        self, *prefixes: str, from_revision: int | None = None, judges_leases: bool = True
    ) -> Watch:
        """Events below any of the prefixes from now on, or from ``from_revision`` (that one included).

        Without ``judges_leases`` the end of a lease is an event as soon as somebody else has noticed it:
        that spares a store without a server reading each lease again and again.

        To miss nothing: ``r = store.revision()``, list, then watch from ``r + 1``. Each key's last
        state always arrives; a watcher that falls thousands of events behind gets the difference
        instead of every step between.
        """

    def revision(self) -> int:
        """The revision of the store's last write; that of a new store is 0, or 1 on etcd."""

    def grant(self, ttl_s: float) -> Lease:
        """A lease that ends ``ttl_s`` seconds after its last renewal, or somewhat later where a store
        has whole seconds and a shortest lease: the lease's own ``ttl_s`` is what was granted."""

    def renewed_ago_s(self, lease_id: str) -> float | None:
        """About how long ago a lease was renewed, in seconds, for people to read: clocks of two hosts
        may be in it, so nothing is decided by it. None where that is not known."""

    def transaction(
        self, compares: Sequence[Compare], *, puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> bool:
        """All writes in one revision if every condition holds, else nothing and False.

        Deleting a key that is not there is allowed. At most MAX_TXN_OPS conditions, and as many writes.
        Raises LeaseLost as ``add`` does.
        """

    def close(self) -> None:
        """Frees files and memory. Leases are not revoked: whoever holds one says goodbye first."""


def canonical(key: str) -> str:
    """Returns ``key`` if it is a proper key: segments between single slashes, none special."""
    if not isinstance(key, str):
        raise _bad_key(key, "is not a string")
    return _checked(key)


def check_value(key: str, value: bytes) -> bytes:
    """Returns ``value`` if a store may hold it."""
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
    """Returns the prefixes of a watch if they are proper and there is one."""
    if not prefixes:
        raise StoreError("a watch of nothing", where="watch", fix="name a key or a prefix")
    return tuple(canonical(prefix) for prefix in prefixes)


def is_under(key: str, prefix: str) -> bool:
    """Whether ``key`` is ``prefix`` or below it. Both canonical."""
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
