"""The trial's CURVE keys, which authorise its processes to talk to each other.

Created once per trial by the launcher, in the trial's folder, and loaded by every worker. One key
pair for all servers and one for all clients: the trial is the unit of trust. Secrets are in a file
that only the user can read; they are never in argv, an environment, a log or a repr.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, Self, TypedDict

import msgspec
import zmq

from realsys.api.errors import ConfigError

_Z85_CHARS = 40  # of a CURVE key of 32 bytes


class _KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialKeypairs:
    """The trial's two key pairs, as Z85 text in bytes, the form of zmq's socket options."""

    server_public: bytes
    client_public: bytes
    server_secret: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """Generates new keys in memory."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    @classmethod
    def create(cls, path: Path) -> Self:
        """Generates new keys and saves them at ``path``, which must not exist.

        The file appears atomically: an early reader finds none, never an incomplete one.
        """
        keys = cls.generate()
        names = _KeyFile.__struct_fields__
        data = msgspec.json.encode(_KeyFile(**{n: getattr(keys, n).decode() for n in names}))
        tmp = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                os.link(tmp, path)
            finally:
                tmp.unlink()
        except FileExistsError:
            raise ConfigError(
                "the trial has keys already", where=str(path), fix="load them: TrialKeypairs.load"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the trial's keys can't be written: {error.strerror}",
                where=str(path),
                fix="make sure that the trial's folder exists and is yours",
            ) from error
        return keys

    @classmethod
    def load(cls, path: Path) -> Self:
        """Loads the keys. Raises ConfigError for a file that others can read, or without keys."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the trial's keys can't be read: {error.strerror}",
                where=str(path),
                fix="the launcher writes them before it starts workers; start it with the launcher",
            ) from error
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077 or status.st_uid != os.geteuid():
                raise ConfigError(
                    f"others can read the trial's keys (mode {status.st_mode & 0o777:04o}, "
                    f"owner {status.st_uid}, we are {os.geteuid()})",
                    where=str(path),
                    fix=f"chmod 600 {path}; if others may have read them, start a new trial",
                )
            return cls._parse(file.read(), path)

    @classmethod
    def _parse(cls, data: bytes, path: Path) -> Self:
        try:
            read = msgspec.json.decode(data, type=_KeyFile)
            keys = {n: getattr(read, n).encode("ascii") for n in _KeyFile.__struct_fields__}
        except (msgspec.MsgspecError, ValueError):
            keys = {}
        if not keys or any(len(key) != _Z85_CHARS for key in keys.values()):
            raise ConfigError(
                "the file holds no CURVE keys", where=str(path), fix="remove it and start again"
            )
        return cls(**keys)


class ChannelIdentity(TypedDict):
    """Arguments by which both ends of a channel know each other: one attempt of one trial, and its keys."""

    trial: str
    attempt: int
    token: NotRequired[str]
    keypairs: TrialKeypairs
