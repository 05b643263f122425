"""The etcd of the tests and its bad network do what the other tests of this tier rely on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, small_disk
from proxy import Proxy, Way


def test_a_killed_member_comes_back_with_its_data(start_etcd: Callable[..., EtcdCluster]) -> None:
    with start_etcd() as etcd:
        etcd.etcdctl("put", "/key", "value")
        etcd.kill()
        assert not etcd.members[0].is_running
        etcd.restart()
        assert etcd.etcdctl("get", "/key", "--print-value-only") == "value\n"


def test_three_members_elect_another_leader(three_etcds: EtcdCluster) -> None:
    first = three_etcds.leader()
    first.kill()
    assert three_etcds.leader() is not first
    three_etcds.etcdctl("put", "/key", "after")
    three_etcds.restart()
    assert len(three_etcds.etcdctl("member", "list").splitlines()) == 3


def test_tls_and_logins(start_etcd: Callable[..., EtcdCluster]) -> None:
    with start_etcd(tls=True, token_ttl_s=2) as etcd:
        etcd.add_users(alice="secret")
        etcd.etcdctl("put", "/key", "value")
        assert (
            etcd.run("get", "/key", user=("alice", "secret"), timeout_s=60).stdout
            == "/key\nvalue\n"
        )
        assert etcd.run("get", "/key", user=("alice", "wrong")).returncode != 0


def test_a_database_above_its_quota_raises_the_alarm(
    start_etcd: Callable[..., EtcdCluster],
) -> None:
    with start_etcd(quota_bytes=1 << 20) as etcd:
        for number in range(20):
            if etcd.run("put", f"/key{number}", "x" * 100_000).returncode:
                break
        assert "NOSPACE" in etcd.etcdctl("alarm", "list")


def test_a_full_disk_ends_writing(
    start_etcd: Callable[..., EtcdCluster], etcd_folder: Path
) -> None:
    with (
        small_disk(etcd_folder / "small disk", size_mib=160) as disk,
        start_etcd(data=disk) as etcd,
    ):
        etcd.etcdctl("put", "/key", "value")
        fill(disk / "filler")
        puts = (etcd.run("put", "/key", "x" * 100_000).returncode for _ in range(30))
        assert any(puts)


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 4096)
            except OSError:
                return


def echo(proxy: Proxy, timeout_s: float = 240) -> socket.socket:
    host, _, port = proxy.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def hear(proxy: Proxy) -> bytes:
    with echo(proxy) as client:  # may be reset before it is connected
        return client.recv(10)


def test_the_proxy_holds_one_way_and_loses_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        with Proxy(target) as proxy, echo(proxy) as client:
            far, _ = server.accept()
            with far:
                far.settimeout(0.3)
                proxy.black_hole(Way.TO_SERVER)
                client.sendall(b"held")
                with pytest.raises(TimeoutError):
                    far.recv(10)
                far.settimeout(60)
                far.sendall(b"passes")
                assert client.recv(10) == b"passes"
                proxy.heal()
                assert far.recv(10) == b"held"
                proxy.delay(0.2)
                sent = time.monotonic()
                far.sendall(b"late")
                assert client.recv(10) == b"late"
                assert time.monotonic() - sent >= 0.2


def test_the_proxy_accepts_and_leads_nowhere_or_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        with Proxy(f"127.0.0.1:{server.getsockname()[1]}") as proxy:
            proxy.half_open()
            with echo(proxy) as client:
                client.sendall(b"hello")
                with pytest.raises(TimeoutError):
                    server.accept()
                server.settimeout(60)
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(10)
                client.settimeout(60)
                proxy.heal()
                with pytest.raises(ConnectionResetError):
                    client.recv(10)
            proxy.drop()
            with pytest.raises(ConnectionResetError):
                hear(proxy)
            proxy.heal()
            with echo(proxy) as client:
                far, _ = server.accept()
                far.close()
                assert client.recv(10) == b""
