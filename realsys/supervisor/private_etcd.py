"""An etcd of the run's own, on the node of its supervisor: nobody else can enter, and it dies with us.

Who calls needs a certificate of an authority that exists for this run only, and a random password. The
peers' port, which one member does not need, listens on loopback under an authority of its own, whose keys
nobody has. No secret is in a command line or an environment; files are for their owner (etcd 3.4 writes
the password into its log of writes).

Its data must be on a local disk or a tmpfs: etcd syncs each write, and network file systems are slow at
it, or pretend. Works with etcd 3.4 and later.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Self

from realsys.api.errors import ClusterError, StoreError, StoreUnavailable
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.supervisor.certificates import Authority, write_private
from realsys.supervisor.tied_program import tied

logger = logging.getLogger(__name__)

PROGRAM = "etcd"
USER = "root"  # etcd's name for who may do everything
DATA, LOG = "data", "etcd.log"  # in its folder
LOOPBACK = "127.0.0.1"
NUM_TRIES = 5  # of other ports, when somebody took ours between the choice and etcd's start
CONNECT_S = 1.0  # after which we look whether it still runs
PROBE_S = 10.0
STOP_S = 5.0
QUOTA_BYTES = 1 << 30  # a run writes a few MiB an hour, and history is thrown away
_FLAGS = {
    "client-cert-auth": "true",
    "peer-client-cert-auth": "true",
    # A watcher that was cut off for longer lists anew.
    "auto-compaction-mode": "periodic",
    "auto-compaction-retention": "10m",
    "quota-backend-bytes": str(QUOTA_BYTES),
    "snapshot-count": "10000",  # writes kept in memory
    # Slow hashes are for passwords that can be guessed. Ours has 256 bits, and a thousand workers log in.
    "bcrypt-cost": "4",
    "logger": "zap",
    "log-level": "warn",
}
_FLAGS_IF_KNOWN = ("--enable-grpc-gateway=false",)  # JSON over HTTP: a door that nobody uses
_TAKEN = "address already in use"


@dataclass(kw_only=True)
class PrivateEtcd:
    """One that answers. ``access`` is what others need to enter it: for files of mode 0600 only."""

    access: EtcdAccess
    folder: Path
    _argv: list[str] = field(repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        host: str,
        timeout_s: float = 30.0,
        ports: Sequence[int] | None = None,
    ) -> Self:
        """Starts one and waits until it asks everybody for a password. Call it from the main thread.

        Args:
            folder: on a local disk; is made. One that is there must be empty, ours, and of mode 0700.
            host: our name or address, as the other nodes call it; nothing else is listened on.
            ports: those it may listen on; None: any free one.
        Raises:
            ClusterError: no such program, no free port, or it did not come up; with the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        program = _find_program()
        _make_folder(folder)
        address = _address_of(host)
        access = _write_certificates(folder, host, address)
        for port in islice(_free_ports(address, ports), NUM_TRIES):
            argv = [program, *_flags(folder, host, address, port), *_known_flags(program)]
            endpoint = f"{_in_url(host)}:{port}"
            etcd = cls(access=replace(access, endpoints=(endpoint,)), folder=folder, _argv=argv)
            try:
                etcd._spawn()
                if etcd._take_over(deadline):
                    logger.info("etcd started pid=%d endpoint=%s", etcd.pid, endpoint)
                    return etcd
            except BaseException:
                etcd.stop(grace_s=0)
                raise
            etcd.stop(grace_s=0)
        raise ClusterError(
            f"etcd found no free port on {address}",
            where=f"{host}, port_range of the cluster spec",
            fix="widen port_range, or look at what listens there: ss -ltn",
        )

    @property
    def url(self) -> str:
        """As open_store takes it, with ``access``."""
        return self.access.where

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def restart(self) -> None:
        """After its end: starts it again where it was, on its data. Clients find it by themselves;
        leases begin anew. Does not wait until it answers."""
        assert self.poll() is not None, "it runs"
        self._spawn()
        logger.warning("etcd restarted pid=%d", self.pid)

    def stop(self, *, grace_s: float = STOP_S) -> None:
        """Ends it and removes its data, which hold 64 MiB and more; its log stays."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()  # SIGKILL: the kernel ends it; no deadline can help otherwise
        shutil.rmtree(self.folder / DATA, ignore_errors=True)

    def log_tail(self, num_lines: int = 10) -> str:
        """What it said last."""
        try:
            text = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-num_lines:])

    def _spawn(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(self.folder / LOG, flags, 0o600)
        try:
            self._process = subprocess.Popen(
                tied(self._argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # a Ctrl-C is for us, who still need it to end well
            )
        finally:
            os.close(log)

    def _take_over(self, deadline: float) -> bool:
        """Makes us its only user, as soon as it answers; False if its port was somebody else's."""
        from realsys.name_resolve.etcd.first_login import make_administrator  # loads grpc

        while True:
            try:
                make_administrator(self.access, timeout_s=CONNECT_S)
                return True
            except StoreUnavailable as error:
                reason = error.what
            except StoreError as error:
                raise self._error(error.what) from error
            if (code := self.poll()) is not None:
                if _TAKEN in self.log_tail():
                    return False
                raise self._error(f"etcd ended with status {code}")
            if time.monotonic() > deadline:
                raise self._error(reason)

    def _error(self, what: str) -> ClusterError:
        said = self.log_tail()
        return ClusterError(
            f"{what}; it said:\n{said}" if said else what,
            where=f"etcd of the run, {self.access.endpoints[0]}, {self.folder}",
            fix="name another etcd or none in name_resolve of the cluster spec, or let its folder be on "
            "a local disk with room",
        )


def _find_program() -> str:
    if found := shutil.which(PROGRAM):
        return found
    raise ClusterError(
        f"no program {PROGRAM} on PATH of {socket.gethostname()}",
        where="name_resolve: etcd+job:// in the cluster spec",
        fix="install etcd 3.4 or later on the compute nodes, put its folder on PATH in `setup`, or leave "
        "name_resolve out: a folder in the file root is used",
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
        return
    except FileExistsError:
        found = folder.lstat()
        private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
        if private and found.st_uid == os.geteuid() and not any(folder.iterdir()):
            return
        what = "the folder is there already, and is not empty, ours and of mode 0700"
    except OSError as error:
        what = f"the folder can't be made: {error.strerror}"
    raise ClusterError(
        what,
        where=str(folder),
        fix="name a new folder, or one of tempfile.mkdtemp, on a local disk",
    )


def _address_of(host: str) -> str:
    """The address to listen on: etcd wants no name there."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ClusterError(
            f"{host!r} has no address here: {error.strerror}",
            where="etcd of the run",
            fix="set interface in the cluster spec to the network that nodes share",
        ) from error


def _write_certificates(folder: Path, host: str, address: str) -> EtcdAccess:
    """Files for the server; for the caller all that a client needs but the endpoint."""
    clients, peers = Authority("realsys run, clients"), Authority("realsys run, peers")
    write_private(folder / "clients_ca.pem", clients.ca_pem)
    write_private(folder / "peers_ca.pem", peers.ca_pem)
    server = clients.server("realsys etcd", tuple(dict.fromkeys((host, address))))
    server.to_files(folder / "server.pem", folder / "server.key")
    peer = peers.server("realsys etcd", (LOOPBACK,))
    peer.to_files(folder / "peer.pem", folder / "peer.key")
    # etcd takes a certificate's name for the user's where there is no login: it is nobody's.
    client = clients.client("realsys client, no user")
    return EtcdAccess(
        endpoints=(),
        user=USER,
        password=secrets.token_urlsafe(32),
        ca_pem=clients.ca_pem,
        cert_pem=client.cert_pem,
        key_pem=client.key_pem,
    )


def _flags(folder: Path, host: str, address: str, port: int) -> list[str]:
    peer = f"https://{LOOPBACK}:{next(_free_ports(LOOPBACK, None))}"
    flags = {
        "name": "run",
        "data-dir": folder / DATA,
        "listen-client-urls": f"https://{_in_url(address)}:{port}",
        "advertise-client-urls": f"https://{_in_url(host)}:{port}",
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"run={peer}",
        "cert-file": folder / "server.pem",
        "key-file": folder / "server.key",
        "trusted-ca-file": folder / "clients_ca.pem",
        "peer-cert-file": folder / "peer.pem",
        "peer-key-file": folder / "peer.key",
        "peer-trusted-ca-file": folder / "peers_ca.pem",
        **_FLAGS,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def _known_flags(program: str) -> list[str]:
    """Those that this version has; one that it has not would end it."""
    return [flag for flag in _FLAGS_IF_KNOWN if _knows(program, flag)]


def _knows(program: str, flag: str) -> bool:
    argv = [program, flag, "--version"]
    try:
        done = subprocess.run(
            argv, env=_environment(), capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _environment() -> dict[str, str]:
    """Ours without ETCD_…, which etcd takes for flags and refuses beside ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}


def _free_ports(address: str, among: Sequence[int] | None) -> Iterator[int]:
    """Free now; another program may take one before we do."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    choices = itertools.repeat(0) if among is None else random.sample(among, len(among))
    for choice in choices:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, choice))
            except OSError as error:
                if among is None:
                    raise ClusterError(
                        f"nothing can listen on {address}: {error.strerror}",
                        where="etcd of the run",
                        fix="set interface in the cluster spec to the network that nodes share",
                    ) from error
                continue
            port = int(probe.getsockname()[1])
        yield port


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
