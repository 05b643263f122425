"""Errors shared by all stores, so that one message describes a case wherever the keys are kept.

For the stores: a key is taken, missing, or did not appear in time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from realsys.api.errors import KeyExists, KeyNotFound, LeaseLost, StoreError, WaitTimeout
from realsys.name_resolve.store import (
    MAX_TXN_OPS,
    Compare,
    Entry,
    Put,
    canonical,
    check_value,
)

logger = logging.getLogger(__name__)

SHORT_VALUE_BYTES = 200  # a holder's value up to this length is shown in KeyExists
MOST_NAMED = 20  # keys named in the error of a wait
ANNOUNCE_EVERY_S = 30.0  # a long wait is logged this often


def taken(held: Entry, *, where: str) -> KeyExists:
    """Returns the error for adding a key that exists."""
    shown = f", held with {held.value!r}" if len(held.value) <= SHORT_VALUE_BYTES else ""
    return KeyExists(
        f"key {held.key!r} exists since revision {held.revision}{shown}",
        where=where,
        fix="another process was first; pass replace=True only if you own the key",
    )


def not_there(key: str, *, where: str) -> KeyNotFound:
    """Returns the error for reading a missing key."""
    return KeyNotFound(
        f"no key {key!r}", where=where, fix="its writer has not written it yet, or has ended"
    )


def not_there_to_delete(key: str, *, where: str) -> KeyNotFound:
    return KeyNotFound(f"no key {key!r} to delete", where=where, fix="pass missing_ok=True if so")


def closed(*, where: str) -> StoreError:
    return StoreError("the store is closed", where=where, fix="open it again")


def lease_lost(what: str, *, where: str) -> LeaseLost:
    """Returns the error for a lease that has ended."""
    fix = "stop this process's side effects and let it exit; others take it for dead"
    return LeaseLost(what, where=where, fix=fix)


def check_ttl(ttl_s: float) -> float:
    if not ttl_s > 0:
        raise StoreError(f"ttl_s={ttl_s} is not above 0", where="grant", fix="15 is usual")
    return ttl_s


def check_transaction(
    compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str], *, where: str
) -> None:
    """Raises StoreError for a transaction that not every store could apply."""
    for compare in compares:
        canonical(compare.key)
    written = [canonical(k) for k in (*(p.key for p in puts), *deletes)]
    if len(set(written)) < len(written):
        raise StoreError(
            f"a transaction writes a key twice: {sorted(written)}",
            where=where,
            fix="put or delete each key once",
        )
    for what, number in (("conditions", len(compares)), ("writes", len(written))):
        if number > MAX_TXN_OPS:
            raise StoreError(
                f"a transaction has {number} {what}, the limit is {MAX_TXN_OPS}",
                where=where,
                fix="split it into several, and mark completion in the last one",
            )
    for put in puts:
        check_value(put.key, put.value)


@dataclass
class KeyWait:
    """One wait for keys: its time, the lines about it in the log, and its error.

    Args:
        where: the store.
    """

    keys: Sequence[str]
    timeout_s: float
    describe_missing: Callable[[list[str]], str] | None
    where: str
    _began_s: float = field(default_factory=time.monotonic)
    _announced_s: float = field(default_factory=time.monotonic)

    @property
    def deadline_s(self) -> float:
        """On ``time.monotonic()``."""
        return self._began_s + self.timeout_s

    def left_s(self, found: Collection[str]) -> float:
        """Returns the time left for the keys that are not ``found``; logs a wait that has been long.

        Raises:
            WaitTimeout: none is left.
        """
        missing, now_s = [key for key in self.keys if key not in found], time.monotonic()
        if now_s >= self.deadline_s:
            raise self._timed_out(missing)
        if now_s - self._announced_s >= ANNOUNCE_EVERY_S:
            self._announced_s = now_s
            text = f"{', '.join(missing[:5])} ({len(missing)} of {len(self.keys)})"
            logger.info("waiting for=%s timeout_s=%g", text, self.timeout_s)
        return self.deadline_s - now_s

    def _timed_out(self, missing: list[str]) -> WaitTimeout:
        what = f"{len(missing)} of {len(self.keys)} keys did not appear in {self.timeout_s:g} s: "
        what += ", ".join(missing[:MOST_NAMED])
        if len(missing) > MOST_NAMED:
            what += f" and {len(missing) - MOST_NAMED} more"
        if self.describe_missing is not None:
            what += f"\n  {self.describe_missing(missing)}"
        fix = "check the logs of the workers that write them"
        return WaitTimeout(what, where=self.where, fix=fix)
