"""Addresses and credentials of an etcd: endpoints, certificates, user and password.

Read from a site's files (``from_spec``), or created by the supervisor that starts an etcd for its
job and passed on in a file that only its owner can read. Secrets are never printed, put in an
environment or on a command line.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from realsys.api.basics.bounded_files import open_regular
from realsys.api.cluster import EtcdSpec
from realsys.api.errors import ConfigError
from realsys.trial.temporary_names import temporary_beside

DEFAULT_PORT = 2379
MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """Everything a client needs to connect. Certificates and keys are PEM text.

    Without ``ca_pem`` and ``cert_pem`` there is no TLS; with ``cert_pem`` alone the servers must be
    signed by an authority that this machine trusts.
    """

    endpoints: tuple[str, ...]  # "host:port", an IPv6 host in brackets
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_pem: str | None = None
    cert_pem: str | None = None
    key_pem: str | None = field(default=None, repr=False)
    # The name in the servers' certificate, if it differs from the endpoint's host.
    server_name: str | None = None
    # The section whose files this was read from.
    source: EtcdSpec | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, partner in (("user", "password"), ("cert_pem", "key_pem")):
            if (getattr(self, name) is None) != (getattr(self, partner) is None):
                raise ConfigError(
                    f"an etcd access has only one of {name} and {partner}",
                    where=self.where,
                    fix="give both or neither (in a cluster's etcd section: the two files)",
                )

    @property
    def where(self) -> str:
        """The address without secrets, for errors and logs."""
        return f"etcd://{','.join(self.endpoints)}"

    @property
    def is_encrypted(self) -> bool:
        return self.ca_pem is not None or self.cert_pem is not None

    def to_file(self, path: Path) -> None:
        """Writes a new file, atomically, that only its owner can read."""
        unfinished = temporary_beside(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(unfinished, flags, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(msgspec.json.encode(self))
                os.link(unfinished, path)  # refuses what is there, unlike a rename
            finally:
                os.unlink(unfinished)
        except OSError as error:
            raise ConfigError(
                f"the etcd access can't be written: {error.strerror}",
                where=str(path),
                fix="name a file that is not there yet, in a folder of your own",
            ) from error

    @classmethod
    def from_file(cls, path: Path) -> Self:
        data = _read(path, what="etcd access", is_secret=True)
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"the etcd access can't be understood: {error}",
                where=str(path),
                fix="write it with EtcdAccess.to_file, by the same version of realsys",
            ) from None  # the cause could show the file's secrets

    def reread(self) -> EtcdAccess:
        """Returns the access read again from its files; ``self`` if it has none or they can't be
        read (they may be in the middle of being replaced)."""
        if self.source is None:
            return self
        try:
            read = EtcdAccess.from_spec(self.endpoints, self.source)
        except ConfigError:
            return self
        return self if read == self else read

    @classmethod
    def from_spec(cls, endpoints: tuple[str, ...], spec: EtcdSpec) -> Self:
        """Reads the files named in a cluster's ``etcd`` section."""

        def text(path: str | None, what: str, *, is_secret: bool = False) -> str | None:
            if path is None:
                return None
            return _read(Path(path).expanduser(), what=what, is_secret=is_secret).decode()

        password = text(spec.password_file, "etcd password", is_secret=True)
        return cls(
            endpoints=endpoints,
            user=spec.user,
            password=password.rstrip("\r\n") if password is not None else None,
            ca_pem=text(spec.ca_file, "etcd certificate authority"),
            cert_pem=text(spec.cert_file, "etcd client certificate"),
            key_pem=text(spec.key_file, "etcd client key", is_secret=True),
            source=spec,
        )


def endpoints_of(url: str) -> tuple[str, ...]:
    """Parses ``etcd://host,host2:2379,[::1]:2379`` into ``host:port`` for each server."""
    endpoints = []
    for server in url.removeprefix("etcd://").rstrip("/").split(","):
        try:
            parts = urlsplit(f"//{server}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.username or parts.path or parts.query or parts.fragment:
            raise ConfigError(
                f"{server!r} in {url!r} is not host:port",
                where="name_resolve address",
                fix="write etcd://host:2379,host2:2379; an IPv6 address in brackets; a user and a "
                "password stand in the cluster's etcd section",
            )
        shown = f"[{host}]" if ":" in host else host
        endpoints.append(f"{shown}:{DEFAULT_PORT if port is None else port}")
    return tuple(endpoints)


def _read(path: Path, *, what: str, is_secret: bool) -> bytes:
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the file of the {what} can't be read: {error.strerror}",
            where=str(path),
            fix="check the path in the cluster's etcd section and the file's owner and permissions",
        ) from error
    if is_secret and mode & 0o077:
        raise ConfigError(
            f"the file of the {what} has mode {mode:04o}: others can read it",
            where=str(path),
            fix=f"chmod 600 {path}; change the secret if others may have read it",
        )
    return data
