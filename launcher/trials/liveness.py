"""Which processes of a trial still run on this host, and ending those that should not.

A process is meant by (pid, start), never by its pid alone. Besides the recorded ones, a process
belongs to a trial when its environment says so (REALSYS_TRIAL_DIR) and it is this user's. Of other
hosts nothing is known here.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from realsys.trial.records import process_start

TRIAL_VARIABLE = "REALSYS_TRIAL_DIR"


class Liveness(StrEnum):
    """What is known of a process."""

    NONE = "none"  # there never was one
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # on another host


@dataclass(frozen=True)
class Process:
    """One process of this host, for good."""

    pid: int
    start: int

    def is_alive(self) -> bool:
        """True while exactly this process runs."""
        return process_start(self.pid) == self.start

    def send(self, number: signal.Signals) -> bool:
        """Signals it. False when it is gone."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def liveness(host: str, pid: int, start: int) -> Liveness:
    """Whether the recorded process runs, as far as this host can say."""
    if host != socket.gethostname():
        return Liveness.UNKNOWN
    return Liveness.ALIVE if Process(pid, start).is_alive() else Liveness.DEAD


def processes_of(trial_dir: Path) -> list[Process]:
    """This user's processes that were started for the trial, ours excepted."""
    wanted = f"{TRIAL_VARIABLE}=".encode() + os.fsencode(trial_dir)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environ = Path("/proc", name, "environ").read_bytes()  # refused for other users'
        except OSError:
            continue
        start = process_start(int(name))
        if start is not None and wanted in environ.split(b"\0"):
            found.append(Process(int(name), start))
    return found


def end_processes(
    find: Callable[[], Iterable[Process]],
    *,
    term_s: float,
    kill_s: float = 5.0,
    poll_s: float = 0.05,
) -> tuple[list[int], list[int], list[int]]:
    """SIGTERM, then SIGKILL, to whatever ``find`` returns, until it returns nothing.

    ``find`` is asked again each time: a process may have started others meanwhile.

    Returns:
        pids that got SIGTERM, that got SIGKILL, and that are left all the same.
    """
    told: dict[signal.Signals, list[int]] = {signal.SIGTERM: [], signal.SIGKILL: []}
    for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + patience_s
        while left := list(find()):
            for process in left:
                if process.pid not in told[number] and process.send(number):
                    told[number].append(process.pid)
            if time.monotonic() > deadline:
                break
            time.sleep(poll_s)
    return told[signal.SIGTERM], told[signal.SIGKILL], [p.pid for p in find()]
