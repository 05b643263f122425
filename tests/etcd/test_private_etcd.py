"""The run's own etcd: only we can enter, it leaves no secret lying about, and it dies with us."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etcd_server import wait_until

from realsys.api.errors import ClusterError, ConfigError, StoreError
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.name_resolve.open import open_store
from realsys.runtime.certificates import Authority, KeyPair
from realsys.supervisor.job_etcd import etcd_setup
from realsys.supervisor.job_etcd.private_etcd import PrivateEtcd

HOST = "127.0.0.1"
KEY = "realsys/v1/c/u/e/t/key"


@pytest.fixture(scope="module")
def own(etcd_folder: Path) -> Iterator[PrivateEtcd]:
    etcd = PrivateEtcd.start(etcd_folder / "own", host=HOST)
    yield etcd
    etcd.stop()


@pytest.fixture
def folder(etcd_folder: Path, tmp_path: Path) -> Path:
    """On the tmpfs, not there yet."""
    return etcd_folder / tmp_path.name


def etcdctl(access: EtcdAccess, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A client that is not ours, with whatever ``access`` has."""
    folder.mkdir(exist_ok=True)
    scheme = "https" if access.ca_pem else "http"
    seconds = (
        3 if access.cert_pem is None or access.ca_pem is None else 15
    )  # refusals take them all
    argv = ["etcdctl", f"--command-timeout={seconds}s", f"--dial-timeout={seconds}s"]
    argv.append(f"--endpoints={scheme}://{access.endpoints[0]}")
    pems = {"cacert": access.ca_pem, "cert": access.cert_pem, "key": access.key_pem}
    for option, pem in pems.items():
        if pem is not None:
            (folder / option).write_text(pem)
            argv.append(f"--{option}={folder / option}")
    if access.user is not None:
        argv.append(f"--user={access.user}:{access.password}")
    return subprocess.run(
        [*argv, *words],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_who_has_the_access_can_read_and_write(own: PrivateEtcd, tmp_path: Path) -> None:
    assert own.poll() is None
    with_all = tmp_path / "with all"
    assert etcdctl(own.access, with_all, "put", "/key", "value").returncode == 0
    assert etcdctl(own.access, with_all, "get", "/key").stdout == "/key\nvalue\n"


def test_our_store_works_on_it_from_a_file(own: PrivateEtcd, tmp_path: Path) -> None:
    own.access.to_file(tmp_path / "access")
    store = open_store(own.url, access=EtcdAccess.from_file(tmp_path / "access"))
    try:
        store.add(KEY, b"value", lease=store.grant(5))
        assert store.get(KEY).value == b"value"
    finally:
        store.close()


STRANGERS: dict[str, dict[str, Any]] = {
    "no TLS": {"ca_pem": None, "cert_pem": None, "key_pem": None},
    "no certificate": {"cert_pem": None, "key_pem": None},
    "no password": {"user": None, "password": None},
    "wrong password": {"password": "guess"},
    "another user": {"user": "nobody"},
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused(own: PrivateEtcd, tmp_path: Path, who: str) -> None:
    access = replace(own.access, **STRANGERS[who])
    done = etcdctl(access, tmp_path / "stranger", "get", "/", "--prefix")
    assert done.returncode != 0
    if "password" in who or "user" in who:
        assert re.search("user name|permission denied|invalid user ID", done.stderr), done.stderr


def test_our_store_refuses_an_etcd_of_another_authority(own: PrivateEtcd) -> None:
    access = replace(own.access, ca_pem=Authority("realsys run, clients").ca_pem)
    with pytest.raises(StoreError):
        open_store(own.url, access=access).revision()


@pytest.mark.parametrize("wrong", [{"password": "guess"}, {"user": None, "password": None}])
def test_our_store_says_why_it_is_refused(own: PrivateEtcd, wrong: dict[str, str | None]) -> None:
    with pytest.raises((StoreError, ConfigError), match=r"password|permission|let the user"):
        open_store(own.url, access=replace(own.access, **wrong)).get(KEY)


def peers_port(own: PrivateEtcd) -> int:
    (url,) = (a for a in cmdline(own.pid) if a.startswith("--listen-peer-urls="))
    assert "127.0.0.1" in url
    return int(url.rpartition(":")[2])


def shake_hands(port: int, pair: KeyPair | None, folder: Path) -> None:
    """TLS as a client that checks nothing itself; of 1.2, where a refusal comes within the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    if pair is not None:
        (folder / "pair").write_text(pair.cert_pem + pair.key_pem)
        context.load_cert_chain(folder / "pair")
    with socket.create_connection((HOST, port), timeout=60) as plain, context.wrap_socket(plain):
        pass


def test_the_port_opens_to_our_certificate_only(own: PrivateEtcd, tmp_path: Path) -> None:
    """Else not even version, health and metrics are told."""
    port, access = int(own.access.endpoints[0].rpartition(":")[2]), own.access
    assert access.cert_pem
    assert access.key_pem
    shake_hands(port, KeyPair(access.cert_pem, access.key_pem), tmp_path)
    for pair in (None, Authority("realsys run, clients").client("realsys client, no user")):
        with pytest.raises(ssl.SSLError, match=r"(?i)alert|eof"):
            shake_hands(port, pair, tmp_path)


def test_the_peers_port_is_closed_to_all(own: PrivateEtcd, tmp_path: Path) -> None:
    """Workers' certificates do not open it: it has an authority of its own."""
    assert own.access.cert_pem
    assert own.access.key_pem
    ours = KeyPair(own.access.cert_pem, own.access.key_pem)
    for pair in (None, ours, Authority("realsys run, peers").client("x")):
        with pytest.raises(ssl.SSLError, match=r"(?i)alert|eof"):
            shake_hands(peers_port(own), pair, tmp_path)
    with socket.create_connection((HOST, peers_port(own)), timeout=60) as plain:
        plain.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert b"200" not in plain.recv(100)


def test_it_listens_nowhere_else(own: PrivateEtcd) -> None:
    port = int(own.access.endpoints[0].rpartition(":")[2])
    assert listening(own.pid) == {("0100007F", port), ("0100007F", peers_port(own))}


def test_no_secret_is_in_its_command_line_environment_or_a_file_of_others(
    own: PrivateEtcd,
) -> None:
    password, key = own.access.password, own.access.key_pem
    assert password
    assert key
    assert len(password) >= 40
    told = b"\0".join(Path(f"/proc/{own.pid}/{n}").read_bytes() for n in ("cmdline", "environ"))
    assert password.encode() not in told
    assert b"PRIVATE KEY" not in told
    assert stat.S_IMODE(own.folder.stat().st_mode) == 0o700
    for file in own.folder.rglob("*"):
        assert not stat.S_IMODE(file.stat().st_mode) & 0o077, file
    assert password not in repr(own)
    assert "PRIVATE" not in repr(own)


def test_a_port_that_somebody_took_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_ports = etcd_setup.free_ports
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]

        def one_is_taken(address: str, among: object) -> Iterator[int]:
            if among is not None:
                yield port
            yield from free_ports(address, None)

        monkeypatch.setattr(etcd_setup, "free_ports", one_is_taken)
        etcd = PrivateEtcd.start(folder, host=HOST, ports=range(port, port + 2))
        try:
            assert etcd.access.endpoints != (f"{HOST}:{port}",)
            assert etcd.poll() is None
        finally:
            etcd.stop()


def test_a_host_may_have_a_name(folder: Path, tmp_path: Path) -> None:
    etcd = PrivateEtcd.start(folder, host="localhost")
    try:
        assert etcdctl(etcd.access, tmp_path, "put", "/key", "value").returncode == 0
        open_store(etcd.url, access=etcd.access).close()
    finally:
        etcd.stop()


def test_no_free_port_in_the_range_is_said(folder: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match="port") as caught:
            PrivateEtcd.start(folder, host=HOST, ports=range(port, port + 1))
    assert "port_range" in caught.value.fix


def test_without_the_program_it_says_how_to_get_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ClusterError, match="etcd") as caught:
        PrivateEtcd.start(folder, host=HOST)
    assert "install etcd" in caught.value.fix
    assert not folder.exists()


def test_a_folder_of_others_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ClusterError, match="mode 0700"):
        PrivateEtcd.start(folder, host=HOST)


def test_an_etcd_that_ends_at_once_is_reported_with_its_words(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho 'the disk is broken' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match=r"status 3.*\n.*broken"):
        PrivateEtcd.start(folder, host=HOST)


def test_the_users_own_etcd_settings_do_not_reach_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_NAME", "another")
    monkeypatch.setenv("ETCD_LISTEN_METRICS_URLS", "http://127.0.0.1:1")
    etcd = PrivateEtcd.start(folder, host=HOST)
    etcd.stop()
    assert etcd.poll() is not None


def test_after_its_end_it_comes_back_with_its_data_and_users(folder: Path, tmp_path: Path) -> None:
    etcd = PrivateEtcd.start(folder, host=HOST)
    try:
        assert etcdctl(etcd.access, tmp_path, "put", "/key", "value").returncode == 0
        os.kill(etcd.pid, signal.SIGKILL)
        wait_until(lambda: etcd.poll() is not None, lambda: "it lives", timeout_s=60)
        etcd.restart()
        wait_until(
            lambda: etcdctl(etcd.access, tmp_path, "get", "/key").stdout == "/key\nvalue\n",
            etcd.log_tail,
            timeout_s=60,
        )
        anonymous = replace(etcd.access, user=None, password=None)
        assert etcdctl(anonymous, tmp_path, "get", "/key").returncode != 0
    finally:
        etcd.stop()


PARENT = """
import sys, time
from pathlib import Path
from realsys.supervisor.job_etcd.private_etcd import PrivateEtcd
etcd = PrivateEtcd.start(Path(sys.argv[1]), host="127.0.0.1")
print(etcd.pid, flush=True)
time.sleep(100)
"""


def test_it_dies_with_its_parent(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert "etcd" in cmdline(pid)[0]
        parent.kill()
    wait_until(lambda: not is_alive(pid), lambda: f"etcd {pid} outlives its parent", timeout_s=60)


def test_starting_it_is_quick(folder: Path) -> None:
    begun = time.monotonic()
    etcd = PrivateEtcd.start(folder, host=HOST)
    took_s = time.monotonic() - begun
    etcd.stop()
    assert took_s < 60


def cmdline(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def listening(pid: int) -> set[tuple[str, int]]:
    """(address in hex, port) of the process's listening TCP sockets, of /proc/net/tcp (proc(5))."""
    links = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].partition(":")
                found.add((address, int(port, 16)))
    return found
