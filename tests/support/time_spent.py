"""What each test took: wall time, and the processors' time of all that it started."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")  # cgroup v1's counter of processor time; limits nothing
NUM_SLOWEST = 10


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
        """The slowest tests, and each tier's time."""
        slowest = sorted(self._tests.items(), key=lambda item: -item[1][0])[:NUM_SLOWEST]
        lines = [f"{'wall s':>8} {'processor s':>12}"]
        lines += [f"{wall:8.1f} {busy:12.1f}  {name}" for name, (wall, busy) in slowest]
        wall_of, busy_of, number = Counter[str](), Counter[str](), Counter[str]()
        for name, (wall, busy) in self._tests.items():
            tier = name.split("/")[1] if name.startswith("tests/") else "others"
            wall_of[tier] += wall  # type: ignore[assignment]
            busy_of[tier] += busy  # type: ignore[assignment]
            number[tier] += 1
        for tier, num in number.items():
            lines.append(f"{wall_of[tier]:8.0f} {busy_of[tier]:12.0f}  {tier}: {num} tests")
        return lines
