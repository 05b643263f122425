"""The daemons under one cluster: started, watched while they start, ended by pid.

Each ends with the process that started it, however that ends (prctl's PDEATHSIG), so that a test run
that is killed leaves none. What they say before their logs open is in ``log/NAME.out``.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_conf import ADDRESS

SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
# Quick, and safe against nothing: the database is thrown away.
_MARIADB = (
    "--no-defaults --user=root --skip-networking --skip-grant-tables --skip-name-resolve "
    "--performance-schema=OFF --innodb-buffer-pool-size=64M --innodb-log-file-size=8M "
    "--innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 --innodb-flush-method=nosync "
    "--innodb-doublewrite=0 --sync-frm=0"
).split()


class Daemons:
    """By name. ``folder`` holds ``etc``, ``run``, ``log`` and ``db``."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.mysql_socket = folder / "run/mysql.sock"
        self._environment = {
            **environment,
            "PATH": f"{environment.get('PATH', '')}:/usr/sbin:/sbin",
            "MYSQL_UNIX_PORT": str(self.mysql_socket),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether it was started and not ended here."""
        return name in self._running

    def start(self, name: str, *argv: str) -> None:
        """Starts one; does not wait for it to be ready."""
        assert name not in self, f"{name} runs"
        with (self.folder / f"log/{name}.out").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def wait_for(self, name: str, ready: Callable[[], bool], *, timeout_s: float = 240) -> None:
        """Until ``ready``; fails with all logs when it has ended, or is not ready in time."""

        def there() -> bool:
            assert self._running[name].poll() is None, f"{name} has ended\n{self.log_tails()}"
            return ready()

        wait_until(there, lambda: f"{name} is not ready\n{self.log_tails()}", timeout_s=timeout_s)

    def wait_for_port(self, name: str, port: int) -> None:
        """Until something listens there."""

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((ADDRESS, port)) == 0

        self.wait_for(name, listens)

    def end(self, name: str, number: signal.Signals) -> None:
        """Signals one and waits for its end."""
        daemon = self._running[name]
        daemon.send_signal(number)
        daemon.wait(60)
        del self._running[name]

    def kill(self) -> None:
        """SIGKILL to all."""
        for daemon in self._running.values():
            daemon.kill()
        for daemon in self._running.values():
            daemon.wait(60)
        self._running.clear()

    def start_munged(self, listen_at: Path) -> None:
        """By force: else it refuses a folder that only its owner may enter, such as pytest's."""
        run = self.folder / "run"
        self.start(
            "munged",
            *("munged", "--foreground", "--force", f"--socket={listen_at}"),
            *(f"--key-file={self.folder}/etc/munge.key", f"--pid-file={run}/munged.pid"),
            *(f"--seed-file={run}/munged.seed", f"--log-file={self.folder}/log/munged.log"),
        )

    def start_mariadbd(self) -> None:
        """An empty database with the one system table that slurmdbd needs, for its procedures."""
        table = re.search(r"^CREATE TABLE IF NOT EXISTS proc .*$", SYSTEM_TABLES.read_text(), re.M)
        assert table, f"{SYSTEM_TABLES} does not say how to make the table proc"
        client = ["mariadb", "--no-defaults", f"--socket={self.mysql_socket}", "--execute"]
        client.append(f"CREATE DATABASE IF NOT EXISTS mysql; USE mysql; {table[0]}")
        self.start(
            "mariadbd",
            *("mariadbd", *_MARIADB, f"--datadir={self.folder}/db"),
            *(f"--socket={self.mysql_socket}", f"--pid-file={self.folder}/run/mysql.pid"),
        )
        self.wait_for(
            "mariadbd",
            lambda: subprocess.run(client, capture_output=True, check=False).returncode == 0,
        )

    def log_tails(self) -> str:
        """The end of every log, for a failing test."""
        logs = sorted(p for p in (self.folder / "log").iterdir() if p.stat().st_size)
        tails = ((p.name, p.read_text(errors="replace").splitlines()[-8:]) for p in logs)
        return "\n".join("\n".join([f"== {name}", *lines]) for name, lines in tails)


def wait_until(done: Callable[[], bool], complaint: Callable[[], str], *, timeout_s: float) -> None:
    """Polls; fails with the complaint when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)
