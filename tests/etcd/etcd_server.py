"""A real etcd of one or several members, for a test: up in a fraction of a second, gone without a trace.

Every member dies with the process that started it (setpriv's pdeathsig), however that ends. What a
member says is in its folder, ``etcd.log``. Nothing is synced to disk unless asked: SIGKILL of a process
loses nothing that it wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from claimed_ports import free_ports

from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.runtime.certificates import Authority, KeyPair

ADDRESS = "127.0.0.1"
ROOT_PASSWORD = "root password"
PROGRAMS = ("etcd", "etcdctl", "setpriv")


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The certificates of a test's servers, and one for its clients; as text and as files."""

    folder: Path
    ca_pem: str
    client: KeyPair

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Files ``ca.pem``, ``server.pem``, ``server.key``, ``client.pem`` and ``client.key``."""
        folder.mkdir(parents=True)
        authority = Authority("test authority")
        client = authority.client("test client")
        (folder / "ca.pem").write_text(authority.ca_pem)
        client.to_files(folder / "client.pem", folder / "client.key")
        server = authority.server("test server", (ADDRESS, "localhost"))
        server.to_files(folder / "server.pem", folder / "server.key")
        return cls(folder=folder, ca_pem=authority.ca_pem, client=client)


class EtcdServer:
    """One member. Made by EtcdCluster, which gives it its ports and flags."""

    def __init__(self, name: str, folder: Path, data: Path, flags: list[str], port: int) -> None:
        self.name, self.folder, self.port = name, folder, port
        self.endpoint = f"{ADDRESS}:{port}"
        self.data, self._flags = data, flags
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it, on the data that it left; does not wait for it to be ready."""
        assert not self.is_running, f"{self.name} runs"
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "etcd", *self._flags],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, as a power cut is to its clients."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: it says goodbye to its clients."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered, until ``thaw``."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def log_tail(self, lines: int = 20) -> str:
        log = self.folder / "etcd.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        return "\n".join([f"== {self.name}", *text.splitlines()[-lines:]])

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self.is_running:
            self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)


class EtcdCluster:
    """A context manager: the members answer inside, and nothing of them is left outside.

    Args:
        folder: is made, for data, logs and certificates; a tmpfs is quickest.
        members: how many.
        tls: clients need TLS and a certificate, see ``tls`` of the cluster.
        token_ttl_s: how long a login is good for.
        quota_bytes: a larger database raises the alarm NOSPACE.
        data: where the database goes, e.g. a small tmpfs (``small_disk``).
        election_ms: a leader that is silent for so long is replaced. The least TTL that etcd grants is
            1.5 times this, rounded up to a second.
        flags: further ones of etcd.
    """

    def __init__(
        self,
        folder: Path,
        *,
        members: int = 1,
        tls: bool = False,
        token_ttl_s: int | None = None,
        quota_bytes: int | None = None,
        data: Path | None = None,
        election_ms: int = 500,
        flags: Mapping[str, object] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.tls = Tls.make(folder / "tls") if tls else None
        self.user: tuple[str, str] | None = None  # of etcdctl, once there are users
        asked: dict[str, object] = {
            "heartbeat-interval": max(10, election_ms // 10),
            "election-timeout": election_ms,
            "logger": "zap",
            "log-level": "warn",
            **({"auth-token-ttl": token_ttl_s} if token_ttl_s is not None else {}),
            **({"quota-backend-bytes": quota_bytes} if quota_bytes is not None else {}),
            **(flags or {}),
        }
        if _knows("--unsafe-no-fsync"):
            asked.setdefault("unsafe-no-fsync", "true")
        if tls:
            asked |= self._tls_flags()
        self.members = tuple(self._members(members, data, asked))

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    @property
    def url(self) -> str:
        """As name_resolve has it."""
        return f"etcd://{','.join(self.endpoints)}"

    def access(
        self, user: str | None = None, password: str | None = None, **other: Any
    ) -> EtcdAccess:
        """What a client enters with; fields of EtcdAccess can be given in place of the right ones."""
        tls = self.tls
        fields: dict[str, Any] = {
            "endpoints": self.endpoints,
            "user": user,
            "password": password,
            "ca_pem": tls.ca_pem if tls else None,
            "cert_pem": tls.client.cert_pem if tls else None,
            "key_pem": tls.client.key_pem if tls else None,
            "server_name": None,
        }
        return EtcdAccess(**{**fields, **other})

    def start(self) -> None:
        for member in self.members:
            member.start()
        self.wait_ready()

    def restart(self) -> None:
        """Starts every member that does not run, on the data that it left, and waits for all."""
        for member in self.members:
            if not member.is_running:
                member.start()
        self.wait_ready()

    def kill(self) -> None:
        """SIGKILL to all."""
        for member in self.members:
            member.kill()

    def wait_ready(self, *, timeout_s: float = 240) -> None:
        """Until every running member answers a linearizable read."""
        for member in self.members:
            if member.is_running:
                wait_until(
                    lambda member=member: self._answers(member),
                    lambda member=member: f"{member.name} is not ready\n{member.log_tail()}",
                    timeout_s=timeout_s,
                )

    def leader(self, *, timeout_s: float = 240) -> EtcdServer:
        """The running member that leads, as soon as one does."""
        found: list[EtcdServer] = []

        def elected() -> bool:
            found.extend(member for member in self.members if self._leads(member))
            return bool(found)

        wait_until(elected, lambda: f"no member leads\n{self.log_tails()}", timeout_s=timeout_s)
        return found[0]

    def add_users(self, **passwords: str) -> None:
        """Logins from now on: root, and each of these with all of etcd, as ``ROLE=password``."""
        self.etcdctl("user", "add", f"root:{ROOT_PASSWORD}")
        self.etcdctl("user", "grant-role", "root", "root")
        for name, password in passwords.items():
            self.etcdctl("role", "add", name)
            self.etcdctl("role", "grant-permission", "--prefix=true", name, "readwrite", "/")
            self.etcdctl("user", "add", f"{name}:{password}")
            self.etcdctl("user", "grant-role", name, name)
        self.etcdctl("auth", "enable")
        self.user = ("root", ROOT_PASSWORD)

    def etcdctl(self, *words: str) -> str:
        """Runs etcdctl as root and returns what it prints; fails when it does."""
        done = self.run(*words, timeout_s=60)  # other tests may keep this machine busy
        assert done.returncode == 0, f"etcdctl {' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def run(
        self,
        *words: str,
        user: tuple[str, str] | None = None,
        member: EtcdServer | None = None,
        timeout_s: int = 5,
    ) -> subprocess.CompletedProcess[str]:
        """Runs etcdctl, as another user if asked; whatever becomes of it."""
        name = ":".join(user or self.user or ())
        # etcdctl waits for a dead endpoint until its deadline.
        members = (member,) if member else [m for m in self.members if m.is_running]
        endpoints = [one.endpoint for one in members or self.members]
        return subprocess.run(
            [
                *("etcdctl", f"--endpoints={','.join(endpoints)}"),
                *(f"--command-timeout={timeout_s}s", f"--dial-timeout={timeout_s}s"),
                *self.etcdctl_tls,
                *([f"--user={name}"] if name else []),
                *words,
            ],
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s + 30,
        )

    @cached_property
    def etcdctl_tls(self) -> list[str]:
        if self.tls is None:
            return []
        names = {"cacert": "ca.pem", "cert": "client.pem", "key": "client.key"}
        return [f"--{option}={self.tls.folder / name}" for option, name in names.items()]

    def log_tails(self) -> str:
        """The end of every log, for a failing test."""
        return "\n".join(member.log_tail() for member in self.members)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self, member: EtcdServer) -> bool:
        assert member.is_running, f"{member.name} has ended\n{member.log_tail()}"
        with socket.socket() as probe:  # cheaper than etcdctl, which waits for seconds
            if probe.connect_ex((ADDRESS, member.port)) != 0:
                return False
        return self.run("endpoint", "health", member=member).returncode == 0

    def _leads(self, member: EtcdServer) -> bool:
        if not member.is_running:
            return False
        done = self.run("endpoint", "status", "--write-out=json", member=member)
        if done.returncode != 0:
            return False
        status = json.loads(done.stdout)[0]["Status"]
        # Without a leader the field is left out.
        return bool(status.get("leader") == status["header"]["member_id"])

    def _tls_flags(self) -> dict[str, object]:
        assert self.tls is not None
        return {
            "client-cert-auth": "true",
            "trusted-ca-file": self.tls.folder / "ca.pem",
            "cert-file": self.tls.folder / "server.pem",
            "key-file": self.tls.folder / "server.key",
        }

    def _members(
        self, number: int, data: Path | None, flags: Mapping[str, object]
    ) -> Iterator[EtcdServer]:
        first = free_ports(2 * number)  # a member that is started again must find its own
        ports = range(first, first + 2 * number)
        names = [f"m{i}" for i in range(number)]
        peers = dict(zip(names, (f"http://{ADDRESS}:{p}" for p in ports[number:]), strict=True))
        scheme = "https" if self.tls else "http"
        for name, port in zip(names, ports, strict=False):
            folder = self.folder / name
            folder.mkdir()
            place = (data or folder) / f"{name}.data"
            url = f"{scheme}://{ADDRESS}:{port}"
            own = {
                "name": name,
                "data-dir": place,
                "listen-client-urls": url,
                "advertise-client-urls": url,
                "listen-peer-urls": peers[name],
                "initial-advertise-peer-urls": peers[name],
                "initial-cluster": ",".join(f"{n}={peer}" for n, peer in peers.items()),
                "initial-cluster-token": self.folder.name,
            }
            words = [f"--{flag}={value}" for flag, value in {**own, **flags}.items()]
            yield EtcdServer(name, folder, place, words, port)


@contextmanager
def small_disk(folder: Path, *, size_mib: int) -> Iterator[Path]:
    """A tmpfs of that size on ``folder``, which is made; etcd lays out 128 MiB at once.

    Skips the test where nothing can be mounted: it needs root, in a container with --privileged.
    """
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def wait_until(done: Callable[[], bool], complaint: Callable[[], str], *, timeout_s: float) -> None:
    """Polls; fails with the complaint when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    """Ours without what etcd and etcdctl would take for settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
    return {**ours, "ETCDCTL_API": "3"}


def _knows(flag: str) -> bool:
    """Whether this etcd has the flag."""
    done = subprocess.run(
        ["etcd", flag, "--version"],
        env=_environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode == 0
