"""Opens a store by its address: ``file:///shared/folder`` or ``memory://name``.

The one place that knows which stores exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from realsys.api.errors import ConfigError, did_you_mean
from realsys.name_resolve.file import FileStore
from realsys.name_resolve.memory import MemoryStore, SharedMemory
from realsys.name_resolve.store import NameResolve

_named: dict[str, SharedMemory] = {}
_named_lock = threading.Lock()


def open_store(url: str) -> NameResolve:
    """Returns an open store; the caller closes it.

    Raises:
        ConfigError: no such scheme, or the rest of the address does not fit it.
        StoreUnavailable: the place does not answer.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(
            f"no name-resolution store for {url!r}",
            where="name_resolve address",
            fix=f"{did_you_mean(scheme, _SCHEMES)} Known forms: file:///folder, memory://name",
        )
    return _SCHEMES[scheme](url)


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
