"""Prepares a run's own etcd: folder, certificates, flags, free ports.

For private_etcd.py, whose header explains the choices. Starts nothing but `etcd --version`.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from realsys.api.errors import ClusterError
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.runtime.certificates import Authority
from realsys.trial.folders import write_private

PROGRAM = "etcd"
USER = "root"  # etcd's name for who may do everything
DATA = "data"  # in its folder
LOOPBACK = "127.0.0.1"
PROBE_S = 10.0
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


def find_program() -> str:
    if found := shutil.which(PROGRAM):
        return found
    raise ClusterError(
        f"no program {PROGRAM} on PATH of {socket.gethostname()}",
        where="name_resolve: etcd+job:// in the cluster spec",
        fix="install etcd 3.4 or later on the compute nodes, put its folder on PATH in `setup`, or leave "
        "name_resolve out: a folder in the file root is used",
    )


def make_folder(folder: Path) -> None:
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


def address_of(host: str) -> str:
    """Resolves the address to listen on: etcd accepts no name there."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ClusterError(
            f"{host!r} has no address here: {error.strerror}",
            where="etcd of the run",
            fix="set interface in the cluster spec to the network that nodes share",
        ) from error


def write_certificates(folder: Path, host: str, address: str) -> EtcdAccess:
    """Writes the server's files; returns everything a client needs except the endpoint."""
    clients, peers = Authority("realsys run, clients"), Authority("realsys run, peers")
    write_private(folder / "clients_ca.pem", clients.ca_pem.encode())
    write_private(folder / "peers_ca.pem", peers.ca_pem.encode())
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


def flags(folder: Path, host: str, address: str, port: int) -> list[str]:
    peer = f"https://{LOOPBACK}:{next(free_ports(LOOPBACK, None))}"
    flags = {
        "name": "run",
        "data-dir": folder / DATA,
        "listen-client-urls": f"https://{in_url(address)}:{port}",
        "advertise-client-urls": f"https://{in_url(host)}:{port}",
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


def known_flags(program: str) -> list[str]:
    """Returns the optional flags that this version supports; an unknown one would end it."""
    return [flag for flag in _FLAGS_IF_KNOWN if _knows(program, flag)]


def _knows(program: str, flag: str) -> bool:
    argv = [program, flag, "--version"]
    try:
        done = subprocess.run(
            argv, env=environment(), capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def environment() -> dict[str, str]:
    """Returns our environment without ETCD_…, which etcd reads as flags and refuses beside ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}


def free_ports(address: str, among: Sequence[int] | None) -> Iterator[int]:
    """Yields ports that are free now; another program may take one before etcd does."""
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


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
