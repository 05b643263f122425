"""Where model workers meet: by a file, or at worker 0's store; who does not come is named."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import golden
import pytest

from realsys.api.errors import ClusterError, WaitTimeout
from realsys.model_worker.rendezvous import Rendezvous, wait_for_all

LOOPBACK = "127.0.0.1"


def rendezvous(
    by: str, worker: int, folder: Path, *, ports: Any = None, timeout_s: float = 240.0
) -> Rendezvous:
    return Rendezvous(
        by,
        worker=worker,
        num_workers=2,
        folder=folder / "meet",
        host=LOOPBACK,
        ports=ports,
        timeout_s=timeout_s,
    )


@pytest.fixture(params=["file", "tcp"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> list[Rendezvous]:
    first, second = (rendezvous(request.param, i, tmp_path) for i in range(2))
    for one in (first, second):
        one.connect_to(first.endpoint)
    return [first, second]


def test_two_workers_share_stores_by_name(two):
    stores = [one.store("main") for one in two]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert not two[1].store("main.weights").check(["key"])


def test_who_does_not_come_is_named(two):
    store = two[0].store("main")
    with golden.raises(WaitTimeout):
        wait_for_all(store, worker=0, num_workers=3, timeout_s=0.2)
    other = two[1].store("main")
    other.set("here/1", "1")
    other.set("here/2", "1")
    wait_for_all(store, worker=0, num_workers=3, timeout_s=240)


def test_a_file_opens_no_port_and_one_worker_needs_no_store(tmp_path):
    assert rendezvous("file", 0, tmp_path).endpoint == ""
    assert rendezvous("tcp", 1, tmp_path).endpoint == ""


def test_nobody_else_reads_the_file(tmp_path):
    """Ids that NCCL's processes know one another by stand in it."""
    rendezvous("file", 0, tmp_path).store("main")
    assert (tmp_path / "meet").stat().st_mode & 0o777 == 0o700


def test_the_store_listens_on_the_workers_address_and_port_range_only(tmp_path):
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with golden.raises(ClusterError):
            rendezvous("tcp", 0, tmp_path, ports=range(port, port + 1))
        others = range(port + 1, port + 200)  # any one of them may be somebody's at any time
        found = rendezvous("tcp", 0, tmp_path, ports=[port, *others])
    host, _, store_port = found.endpoint.rpartition(":")
    assert host == LOOPBACK
    assert int(store_port) in others
    socket.create_connection((LOOPBACK, int(store_port)), timeout=240).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(store_port)), timeout=240)


def test_a_store_that_is_gone_is_told_with_its_address(tmp_path):
    with socket.socket() as nobody:
        nobody.bind((LOOPBACK, 0))  # and does not listen
        endpoint = f"{LOOPBACK}:{nobody.getsockname()[1]}"
        one = rendezvous("tcp", 1, tmp_path, timeout_s=1.0)
        one.connect_to(endpoint)
        with golden.raises(WaitTimeout):
            one.store("main")
