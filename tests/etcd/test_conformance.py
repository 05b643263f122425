"""The conformance suite over all stores in real time, and between real processes.

The cases are in tests/name_resolve_cases.py; each has a trial of its own on the session's etcd.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdCluster
from name_resolve_cases import *  # noqa: F403 (the suite)

from realsys.name_resolve.file import FileStore
from realsys.name_resolve.memory import MemoryStore, SharedMemory
from realsys.name_resolve.open import open_store
from realsys.name_resolve.store import Lease, NameResolve

_numbers = itertools.count(1)


class RealTime:
    """See Passing in the cases. etcd's leases end up to a second late."""

    def __init__(self, *, ttl_s: float, late_s: float) -> None:
        self.ttl_s, self._late_s = ttl_s, late_s

    def most_of(self, lease: Lease) -> None:
        time.sleep(0.5 * lease.ttl_s)

    def all_of(self, lease: Lease) -> None:
        time.sleep(lease.ttl_s + self._late_s)


@pytest.fixture(params=["memory", "file", "etcd"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_another(
    kind: str, tmp_path: Path, etcd: EtcdCluster
) -> Iterator[Callable[[], NameResolve]]:
    shared, opened = SharedMemory(), []

    def open_one() -> NameResolve:
        store: NameResolve
        if kind == "memory":
            store = MemoryStore(shared)
        elif kind == "file":
            store = FileStore(tmp_path / "store", poll_s=0.005)
        else:
            store = open_store(etcd.url)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_another: Callable[[], NameResolve]) -> NameResolve:
    return open_another()


@pytest.fixture
def root() -> str:
    return f"realsys/v1/site/anna/ppo-{next(_numbers)}/run1"


@pytest.fixture
def passing(kind: str) -> RealTime:
    return RealTime(ttl_s=1, late_s=1.6) if kind == "etcd" else RealTime(ttl_s=0.4, late_s=0.1)
