"""Opens a store by its address: ``etcd://host:2379,host2``, ``file:///folder`` or
``memory://name``.

The only module that knows which stores exist. The etcd store is imported when an address asks for
it: gRPC must not be loaded by a process that forks, nor by one that needs no etcd.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from realsys.api.errors import ConfigError, did_you_mean
from realsys.name_resolve.file.file_store import FileStore
from realsys.name_resolve.memory_store import MemoryStore, SharedMemory
from realsys.name_resolve.store import NameResolve

if TYPE_CHECKING:
    from realsys.name_resolve.etcd.access import EtcdAccess

_named: dict[str, SharedMemory] = {}
_named_lock = threading.Lock()


def open_store(url: str, *, access: EtcdAccess | None = None) -> NameResolve:
    """Returns an open store; the caller closes it.

    Args:
        access: credentials of an etcd; without it no TLS and no user. Its endpoints are used if the
            address names none (``etcd+job://``).
    Raises:
        ConfigError: no such scheme, or the rest of the address does not fit it.
        StoreUnavailable: the place does not answer.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme in ("etcd", "etcd+job"):
        return _open_etcd(url, access)
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(
            f"no name-resolution store for {url!r}",
            where="name_resolve address",
            fix=f"{did_you_mean(scheme, [*_SCHEMES, 'etcd'])} "
            "Known forms: etcd://host:2379,host2:2379, file:///folder, memory://name",
        )
    return _SCHEMES[scheme](url)


def _open_etcd(url: str, access: EtcdAccess | None) -> NameResolve:
    from realsys.name_resolve.etcd.access import EtcdAccess, endpoints_of
    from realsys.name_resolve.etcd.etcd_store import EtcdStore

    if url.startswith("etcd+job://"):
        if access is None:
            raise ConfigError(
                f"{url!r} is an etcd that a job starts for itself, and no access file was given",
                where="name_resolve address",
                fix="open it with the access file that the job's supervisor wrote",
            )
        return EtcdStore.open(access)
    endpoints = endpoints_of(url)
    if access is None:
        return EtcdStore.open(EtcdAccess(endpoints=endpoints))
    return EtcdStore.open(dataclasses.replace(access, endpoints=endpoints))


def _open_file(url: str) -> NameResolve:
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise ConfigError(
            f"{url!r} does not name an absolute folder",
            where="name_resolve address",
            fix="write three slashes: file:///shared/folder",
        )
    return FileStore(Path(unquote(parts.path)))


def _open_memory(url: str) -> NameResolve:
    name = url.removeprefix("memory://")
    with _named_lock:
        shared = _named.setdefault(name, SharedMemory())
    return MemoryStore(shared, name=name)


_SCHEMES: dict[str, Callable[[str], NameResolve]] = {"file": _open_file, "memory": _open_memory}
