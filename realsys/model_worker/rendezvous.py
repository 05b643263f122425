"""Rendezvous of an attempt's model workers for process groups: through a file or a store of worker 0.

The file is in the attempt's folder, which only its user can write, and needs no port; its file system
must honour locks (flock) between nodes. Worker 0's store (torch's TCPStore) needs no locks and is
faster for many workers, but does not authenticate clients: docs/security.md. It listens on the
worker's own address and ends with the worker.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from realsys.api.errors import ClusterError, WaitTimeout
from realsys.transport.binding import address_of


class Rendezvous:
    """One worker's access to the rendezvous.

    Other workers need worker 0's ``endpoint`` before they open a store.

    Args:
        by: ``file`` or ``tcp``.
        folder: folder of the files.
        host, ports: address of worker 0's store and its allowed ports; None: any free port.
    """

    def __init__(
        self,
        by: str,
        *,
        worker: int,
        num_workers: int,
        folder: Path,
        host: str,
        ports: Iterable[int] | None,
        timeout_s: float,
    ) -> None:
        self._by, self._worker, self._num_workers = by, worker, num_workers
        self._folder, self._timeout_s = folder, timeout_s
        self._tcp: Any = None
        self.endpoint = ""
        if by == "tcp" and worker == 0 and num_workers > 1:
            self._serve(host, ports)

    def store(self, name: str) -> Any:
        """Returns the ``torch.distributed.Store`` that all workers of the attempt share under this name.

        Raises:
            WaitTimeout: worker 0's store does not answer.
        """
        import torch.distributed as dist

        if self._by != "tcp":
            # FileStore creates files with mode 0644
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = str(self._folder / name)
            return dist.FileStore(path, self._num_workers)  # type: ignore[attr-defined]
        if self._tcp is None:
            self._tcp = self._connect()
        return dist.PrefixStore(name, self._tcp)  # type: ignore[attr-defined]

    def connect_to(self, endpoint: str) -> None:
        """Sets the address of worker 0's store."""
        self.endpoint = self.endpoint or endpoint

    def _serve(self, host: str, ports: Iterable[int] | None) -> None:
        listening = _bind(host, ports)
        port = listening.getsockname()[1]
        self._tcp = self._store(host, port, is_master=True, master_listen_fd=listening.detach())
        self.endpoint = f"{host}:{port}"

    def _connect(self) -> Any:
        host, _, port = self.endpoint.rpartition(":")
        try:
            return self._store(host, int(port), is_master=False)
        except RuntimeError as error:  # torch reports store and socket errors as RuntimeError
            raise WaitTimeout(
                f"model_worker/0 did not answer at {self.endpoint} in {self._timeout_s:g} s: "
                f"{str(error).splitlines()[0]}",
                where=f"process groups, model_worker/{self._worker}",
                fix="see the log of model_worker/0; its node must be reachable on this port (interface and "
                "port_range of the cluster spec)",
            ) from error

    def _store(self, host: str, port: int, **options: Any) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            self._num_workers,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            **options,
        )


def wait_for_all(store: Any, *, worker: int, num_workers: int, timeout_s: float) -> None:
    """Waits until all workers have reached this point.

    Raises:
        WaitTimeout: names the missing workers.
    """
    keys = [f"here/{i}" for i in range(num_workers)]
    store.set(keys[worker], b"1")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [i for i, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WaitTimeout(
            f"model_worker/{missing[0]}{others} did not reach the process-group rendezvous "
            f"in {timeout_s:g} s",
            where=f"process groups, model_worker/{worker}",
            fix=f"see the log of model_worker/{missing[0]}",
        ) from error


def _bind(host: str, ports: Iterable[int] | None) -> socket.socket:
    family, address = address_of(host)
    tried = 0
    for port in (0,) if ports is None else ports:
        tried += 1
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.bind((address, port))
            listening.listen(socket.SOMAXCONN)
            return listening
        except OSError as error:
            listening.close()
            taken = error
    raise ClusterError(
        f"none of {tried} ports is free for the workers' rendezvous: {taken}",
        where=f"{host}, port_range of the cluster spec",
        fix="widen port_range, or use rendezvous: file",
    )
