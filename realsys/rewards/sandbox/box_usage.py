"""What all processes of a box use together, read from the box's own /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PAGE_BYTES, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_OWN = "1"  # the box's init does not count


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxUsage:
    """Sums over the processes of a box that are alive."""

    memory_bytes: int  # resident; pages that several processes map count in each
    cpu_s: float  # with what children that they waited for used
    processes: int  # with threads


def parse_stat(stats: list[bytes]) -> BoxUsage:
    """Sums contents of /proc/PID/stat; proc(5)."""
    ticks = pages = threads = 0
    for stat in stats:
        fields = stat[stat.rindex(b")") + 2 :].split()  # from the state, the third field, on
        ticks += sum(int(number) for number in fields[11:15])
        threads += int(fields[17])
        pages += int(fields[21])
    return BoxUsage(memory_bytes=pages * _PAGE_BYTES, cpu_s=ticks / _TICKS, processes=threads)


def read_usage() -> BoxUsage:
    """Reads the usage of all processes of this process's pid namespace but the first."""
    return parse_stat([stat for pid in _pids() if (stat := _read(f"/proc/{pid}/stat"))])


def exact_memory_bytes() -> int:
    """Reads the memory of all processes, shared pages once. Slower: for when the sum is too large."""
    total = 0
    for pid in _pids():
        if rollup := _read(f"/proc/{pid}/smaps_rollup"):
            total += int(rollup.partition(b"\nPss:")[2].split()[0]) << 10
        elif stat := _read(f"/proc/{pid}/stat"):  # it hides its memory: all of it counts
            total += parse_stat([stat]).memory_bytes
    return total


def oom_kills() -> int:
    """Returns how often this node's kernel ran out of memory and killed; 0 if it does not say."""
    counted = _read("/proc/vmstat").partition(b"\noom_kill ")[2].split()
    return int(counted[0]) if counted else 0


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal() and name != _OWN]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:  # it has ended
        return b""
