"""Determines which processes of a trial still run on this host, and ends those that should not.

A process is identified by (pid, start), never by its pid alone. Besides the recorded ones, a process
belongs to a trial if its environment says so (REALSYS_TRIAL_DIR) and it is this user's. Nothing is known
about other hosts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from realsys.trial.machine_identity import MachineIdentity, Whereabouts, whereabouts
from realsys.trial.records import process_start

TRIAL_VARIABLE = "REALSYS_TRIAL_DIR"
KILL_S, POLL_S = 5.0, 0.05  # of end_processes


class Liveness(StrEnum):
    """What is known about a process."""

    NONE = "none"  # there was none
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # on another host


@dataclass(frozen=True)
class Process:
    """One process of this host, uniquely identified."""

    pid: int
    start: int

    def is_alive(self) -> bool:
        """Whether exactly this process runs."""
        return process_start(self.pid) == self.start

    def send(self, number: signal.Signals) -> bool:
        """Sends it a signal. False if it has ended."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def liveness(host: str, pid: int, start: int, machine: MachineIdentity | None = None) -> Liveness:
    """Whether the recorded process runs, as far as this host can determine."""
    where = whereabouts(host, machine)
    if where is not Whereabouts.HERE:
        return Liveness.UNKNOWN if where is Whereabouts.ELSEWHERE else Liveness.DEAD
    return Liveness.ALIVE if Process(pid, start).is_alive() else Liveness.DEAD


def processes_of(trial_dir: Path) -> list[Process]:
    """Lists this user's processes that were started for the trial, except this one, by whatever path
    they or the caller name its folder."""
    prefix, home = f"{TRIAL_VARIABLE}=".encode(), os.fsencode(trial_dir)
    is_trial = {home: True}  # by what a process calls its trial's folder
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environ = Path("/proc", name, "environ").read_bytes()  # refused for other users'
        except OSError:
            continue
        start = process_start(int(name))
        named = {v.removeprefix(prefix) for v in environ.split(b"\0") if v.startswith(prefix)}
        for path in named - is_trial.keys():
            is_trial[path] = os.path.realpath(path) == os.path.realpath(home)
        if start is not None and any(is_trial[path] for path in named):
            found.append(Process(int(name), start))
    return found


def end_processes(
    find: Callable[[], Iterable[Process]], *, term_s: float
) -> tuple[list[int], list[int], list[int]]:
    """Sends SIGTERM, then SIGKILL, to the processes that ``find`` returns, until it returns none.

    ``find`` is called again each time, because a process may have started others meanwhile.

    Returns:
        pids that got SIGTERM, that got SIGKILL, and that still run.
    """
    signalled: dict[signal.Signals, list[int]] = {signal.SIGTERM: [], signal.SIGKILL: []}
    for number, timeout_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILL_S)):
        deadline = time.monotonic() + timeout_s
        while left := list(find()):
            for process in left:
                if process.pid not in signalled[number] and process.send(number):
                    signalled[number].append(process.pid)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    return signalled[signal.SIGTERM], signalled[signal.SIGKILL], [p.pid for p in find()]
