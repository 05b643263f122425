"""What each test took: wall time, and the processors' time of all that it started."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")  # cgroup v1's counter of processor time; limits nothing
NUM_SLOWEST = 10
NUM_FILES = 40


class ProcessorClock:
    """Counts this process and all that it starts, in a control group of its own.

    Where there is none, what has ended and was waited for: a trial that goes on by itself, or a Slurm's
    daemons, are then missing.
    """

    def __init__(self) -> None:
        self._usage: int | None = None
        group = _group_of(os.getpid())
        with suppress(OSError):
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            self._usage = os.open(group / "cpuacct.usage", os.O_RDONLY | os.O_CLOEXEC)

    def now(self) -> tuple[float, float]:
        """Seconds of wall time, and of processors."""
        if self._usage is not None:
            return time.monotonic(), int(os.pread(self._usage, 32, 0)) / 1e9
        of = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in of)

    @staticmethod
    def remove(pid: int) -> None:
        """Ends the group of a process that has ended; one in which something lives on stays."""
        with suppress(OSError):
            _group_of(pid).rmdir()


def _group_of(pid: int) -> Path:
    """In the group of this process's parent, or of this one in its parent."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "cpuacct":
            own = ACCOUNTS / path.lstrip("/")
            return own / f"realsys-tests-{pid}"
    return ACCOUNTS / f"realsys-tests-{pid}"


class TimeSpent:
    """Of the tests of a run.

    Args:
        file: where a line of JSON is appended for each test.
    """

    KEY = pytest.StashKey["TimeSpent"]()

    def __init__(self, file: str | None) -> None:
        self._tests: dict[str, tuple[float, float]] = {}
        self._file = file

    def add(self, nodeid: str, wall_s: float, processor_s: float) -> None:
        """One that has ended."""
        self._tests[nodeid] = wall_s, processor_s
        if self._file:
            with open(self._file, "a") as file:
                file.write(json.dumps([nodeid, wall_s, processor_s]) + "\n")

    def lines(self) -> list[str]:
        """The slowest tests, the files that computed most, and each tier."""
        slowest = sorted(self._tests.items(), key=lambda item: -item[1][0])[:NUM_SLOWEST]
        lines = [f"{'wall s':>8} {'processor s':>12}"]
        lines += [f"{wall_s:8.1f} {busy_s:12.1f}  {name}" for name, (wall_s, busy_s) in slowest]
        files = self._sums(lambda name: name.partition("::")[0])
        most = sorted(files.items(), key=lambda item: -item[1][1])[:NUM_FILES]
        for where, (wall_s, busy_s, num) in [*most, *self._sums(_tier).items()]:
            lines.append(f"{wall_s:8.0f} {busy_s:12.0f}  {where}: {num} tests")
        return lines

    def _sums(self, place: Callable[[str], str]) -> dict[str, tuple[float, float, int]]:
        """Place → seconds of wall time, of processors, number of tests."""
        found: dict[str, tuple[float, float, int]] = {}
        for name, (wall_s, busy_s) in self._tests.items():
            before = found.get(place(name), (0.0, 0.0, 0))
            found[place(name)] = before[0] + wall_s, before[1] + busy_s, before[2] + 1
        return found


def _tier(nodeid: str) -> str:
    return "/".join(nodeid.split("/")[:2])
