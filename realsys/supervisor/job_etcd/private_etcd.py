"""An etcd of the run's own, on its supervisor's node: no one else can log in, and it ends with the
supervisor.

A client needs a certificate of an authority that exists for this run only, and a random password. The
peers' port, which a single member does not need, listens on loopback under an authority of its own, whose
keys are discarded. No secret is on a command line or in an environment; files are readable only by their
owner (etcd 3.4 writes the password into its write-ahead log).

Its data must be on a local disk or a tmpfs: etcd syncs each write, and network file systems are slow at
it, or do not really sync. Works with etcd 3.4 and later.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Self

from realsys.api.errors import ClusterError, StoreError
from realsys.name_resolve.etcd.access import EtcdAccess
from realsys.runtime.child_processes.parent_death import tied
from realsys.supervisor.job_etcd import etcd_setup as setup

logger = logging.getLogger(__name__)

LOG = "etcd.log"  # in its folder
NUM_TRIES = 5  # ports to try, if one is taken between its choice and etcd's start
STOP_S = 5.0
_TAKEN = "address already in use"


class _PortTaken(Exception):
    """Raised if the port was taken between its choice and etcd's start."""


@dataclass(kw_only=True)
class PrivateEtcd:
    """A running etcd. ``access`` has the credentials: store it in files of mode 0600 only."""

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
        """Starts one and waits until it requires passwords. Call it from the main thread.

        Args:
            folder: on a local disk; created if missing, else it must be empty, ours, and of mode 0700.
            host: our name or address, as the other nodes use it; the only one it listens on.
            ports: those it may listen on; None: any free one.
        Raises:
            ClusterError: no such program, no free port, or it did not start; with the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        program = setup.find_program()
        setup.make_folder(folder)
        address = setup.address_of(host)
        access = setup.write_certificates(folder, host, address)
        for port in islice(setup.free_ports(address, ports), NUM_TRIES):
            argv = [program, *setup.flags(folder, host, address, port), *setup.known_flags(program)]
            endpoint = f"{setup.in_url(host)}:{port}"
            etcd = cls(access=replace(access, endpoints=(endpoint,)), folder=folder, _argv=argv)
            try:
                etcd._spawn()
                if etcd._create_administrator(deadline):
                    logger.info("etcd started pid=%d endpoint=%s", etcd.pid, endpoint)
                    return etcd
            except BaseException:
                etcd.stop(grace_s=0)
                raise
            etcd.stop(grace_s=0)
            (folder / LOG).unlink(missing_ok=True)  # the next attempt is judged by its own log
        raise ClusterError(
            f"etcd found no free port on {address}",
            where=f"{host}, port_range of the cluster spec",
            fix="widen port_range, or look at what listens there: ss -ltn",
        )

    @property
    def url(self) -> str:
        """Address for ``open_store``, together with ``access``."""
        return self.access.where

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def restart(self) -> None:
        """Restarts it after its end, on its data and port. Clients reconnect by themselves; leases start
        again. Does not wait until it answers."""
        assert self.poll() is not None, "it runs"
        self._spawn()
        logger.warning("etcd restarted pid=%d", self.pid)

    def stop(self, *, grace_s: float = STOP_S) -> None:
        """Ends it and removes its data, which take 64 MiB and more; its log stays."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()  # SIGKILL: the kernel ends it; no deadline can help otherwise
        shutil.rmtree(self.folder / setup.DATA, ignore_errors=True)

    def log_tail(self, num_lines: int = 10) -> str:
        """Returns the last lines of its log."""
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
                env=setup.environment(),
                start_new_session=True,  # a Ctrl-C is for us, who still need it to end well
            )
        finally:
            os.close(log)

    def _create_administrator(self, deadline: float) -> bool:
        """Makes us its only user, as soon as it answers; returns False if its port was taken."""
        from realsys.name_resolve.etcd.first_login import make_administrator  # loads grpc

        left_s = max(0.0, deadline - time.monotonic())
        try:
            make_administrator(self.access, timeout_s=left_s, still_there=self._check_alive)
        except _PortTaken:
            return False
        except StoreError as error:
            raise self._error(error.what) from error
        return True

    def _check_alive(self) -> None:
        if (code := self.poll()) is None:
            return
        if _TAKEN in self.log_tail():
            raise _PortTaken
        raise self._error(f"etcd ended with status {code}")

    def _error(self, what: str) -> ClusterError:
        log = self.log_tail()
        return ClusterError(
            f"{what}; its log ends:\n{log}" if log else what,
            where=f"etcd of the run, {self.access.endpoints[0]}, {self.folder}",
            fix="name another etcd or none in name_resolve of the cluster spec, or let its folder be on "
            "a local disk with room",
        )
