"""The etcd tier: a real etcd on this machine. Tests that harm it start one of their own.

``etcd`` is one member for the whole session, without TLS and logins, to be used below prefixes of one's
own. ``start_etcd`` makes any other (EtcdCluster's options), to be entered by ``with``: one member is up
in a fifth of a second, three in one.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import PROGRAMS, EtcdCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is of the etcd tier."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.etcd)


def missing() -> str | None:
    """What keeps an etcd from being started here, and what to do; None when nothing does."""
    gone = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"no {', '.join(gone)} here: make etcd-packages" if gone else None


@pytest.fixture(scope="session", autouse=True)
def _etcd_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def etcd_folder(_etcd_is_here: None) -> Iterator[Path]:
    """On a tmpfs where there is one; removed at the end."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="etcd-", dir=place))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def start_etcd(etcd_folder: Path) -> Callable[..., EtcdCluster]:
    """Makes a cluster with the given options; it starts and ends with ``with``."""
    numbers = itertools.count(1)

    def start(**options: Any) -> EtcdCluster:
        return EtcdCluster(etcd_folder / f"cluster{next(numbers)}", **options)

    return start


@pytest.fixture(scope="session")
def etcd(start_etcd: Callable[..., EtcdCluster]) -> Iterator[EtcdCluster]:
    """One member, shared by all tests of the session: don't harm it."""
    with start_etcd() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_etcds(start_etcd: Callable[..., EtcdCluster]) -> Iterator[EtcdCluster]:
    """Three members, shared by a module. A test that ends one calls ``restart()`` afterwards."""
    with start_etcd(members=3) as cluster:
        yield cluster
