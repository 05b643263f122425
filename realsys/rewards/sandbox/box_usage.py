"""What all processes of a box use together, read from the box's own /proc.

Memory is more than what is resident: what was swapped out, page tables, and what the kernel holds in pipes,
sockets and file locks, none of which is in the resident size of a process.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_OWN = "1"  # the box's init does not count
PIPE_BYTES = 16 * _PAGE_BYTES  # a pipe holds so much; the filter lets none be made larger
_MESSAGE_BYTES = 1 << 16  # the last one in a socket may go so far beyond its buffer
_LOCK_BYTES = 256  # of a lock on a range of a file
_MOST_LOCKS_READ, _PIECE_BYTES = 4 << 20, 1 << 16  # of /proc/locks


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxUsage:
    """Sums over the processes of a box that are alive."""

    memory_bytes: int  # pages that several processes map count in each; without pipes
    cpu_s: float  # with what children that they waited for used
    processes: int  # with threads
    pipe_bytes_at_most: int = 0  # if each descriptor that they have room for were a full pipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Fields of /proc/PID/status, in bytes but for the last; proc(5)."""

    private: int  # RssAnon and RssShmem
    swapped: int
    page_tables: int
    descriptors: int  # room for them


def parse_stat(stats: list[bytes]) -> BoxUsage:
    """Sums contents of /proc/PID/stat; proc(5)."""
    ticks = pages = threads = 0
    for text in stats:
        fields = text[text.rindex(b")") + 2 :].split()  # from the state, the third field, on
        ticks += sum(int(number) for number in fields[11:15])
        threads += int(fields[17])
        pages += int(fields[21])
    return BoxUsage(memory_bytes=pages * _PAGE_BYTES, cpu_s=ticks / _TICKS, processes=threads)


def parse_status(text: bytes) -> ProcessMemory:
    """Reads a /proc/PID/status. A process without memory, such as a zombie, lacks most fields."""
    fields = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)

    def number(name: bytes) -> int:
        words = fields.get(name, b"0").split()
        return int(words[0]) << (10 if len(words) > 1 else 0)

    return ProcessMemory(
        private=number(b"RssAnon") + number(b"RssShmem"),
        swapped=number(b"VmSwap"),
        page_tables=number(b"VmPTE"),
        descriptors=number(b"FDSize"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxMeter:
    """Reads usage. ``socket_bytes``: what a socket counts; 0 where the box has the node's sockets."""

    socket_bytes: int

    def usage(self) -> BoxUsage:
        """Returns the usage of all processes of this process's pid namespace but the first."""
        pids = _pids()
        found = parse_stat([text for pid in pids if (text := _read(f"/proc/{pid}/stat"))])
        about = [parse_status(_read(f"/proc/{pid}/status")) for pid in pids]
        beside = sum(process.swapped + process.page_tables for process in about)
        return BoxUsage(
            memory_bytes=found.memory_bytes + beside + self._kernel_bytes(),
            cpu_s=found.cpu_s,
            processes=found.processes,
            pipe_bytes_at_most=PIPE_BYTES * sum(process.descriptors for process in about),
        )

    def exact_memory_bytes(self) -> int:
        """Returns the memory of all processes, shared pages and pipes once.

        Slower: for when the sum is too large.
        """
        pids = _pids()
        total = self._kernel_bytes() + _pipe_bytes(pids)
        for pid in pids:
            about = parse_status(_read(f"/proc/{pid}/status"))
            total += about.swapped + about.page_tables
            if rollup := _read(f"/proc/{pid}/smaps_rollup"):
                total += int(rollup.partition(b"\nPss:")[2].split()[0]) << 10
            else:  # it hides its memory: all counts that is no file of the read-only folders
                total += about.private
        return total

    def pipe_bytes(self) -> int:
        """Returns what the pipes of all processes may hold, named ones included, each once."""
        return _pipe_bytes(_pids())

    def _kernel_bytes(self) -> int:
        locks = _read("/proc/locks", _MOST_LOCKS_READ).count(b"\n")
        sockets = _sockets() if self.socket_bytes else 0
        return locks * _LOCK_BYTES + sockets * self.socket_bytes


def socket_bytes() -> int:
    """Returns what one socket may hold that nobody has read: the kernel says it of no single one."""
    with socket.socket(socket.AF_UNIX) as made:
        return made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + _MESSAGE_BYTES


def _sockets() -> int:
    """Returns the number of sockets of this network namespace, closed ones that hold data included."""
    words = _read("/proc/net/sockstat").partition(b"sockets: used ")[2].split()
    return int(words[0]) if words else 0


def _pipe_bytes(pids: list[str]) -> int:
    pipes: set[tuple[int, int]] = set()
    hidden = 0
    for pid in pids:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:  # it hides them: each may be a pipe
            hidden += parse_status(_read(f"/proc/{pid}/status")).descriptors
            continue
        except OSError:  # it has ended
            continue
        for number in numbers:
            with suppress(OSError):
                about = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISFIFO(about.st_mode):
                    pipes.add((about.st_dev, about.st_ino))
    return (len(pipes) + hidden) * PIPE_BYTES


def open_oom_counter() -> int | None:
    """Opens the file in which this process's cgroup counts kills for want of memory; None: it has none.

    A namespace later hides the file; the descriptor stays.
    """
    for path in oom_files(_read("/proc/self/cgroup").decode()):
        with suppress(OSError):
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if b"oom_kill " in os.pread(opened, 1 << 12, 0):
                return opened
            os.close(opened)
    return None


def oom_files(groups: str) -> list[Path]:
    """Returns where the cgroups of a /proc/PID/cgroup count kills; cgroups(7), versions 2 and 1."""
    found: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers and inside:
            found.append(Path("/sys/fs/cgroup", inside, "memory.events"))
            found.append(Path("/sys/fs/cgroup/unified", inside, "memory.events"))
        elif "memory" in controllers.split(",") and inside:
            found.append(Path("/sys/fs/cgroup/memory", inside, "memory.oom_control"))
    return found


def oom_kills(counter: int | None) -> int:
    """Returns how often processes were killed for want of memory; 0 if the kernel does not say.

    Args:
        counter: a descriptor of ``open_oom_counter``: those of its cgroup count; None: all of the node.
    """
    if counter is None:
        text = _read("/proc/vmstat")
    else:
        try:
            text = os.pread(counter, 1 << 12, 0)
        except OSError:  # the cgroup is gone
            return 0
    counted = text.partition(b"oom_kill ")[2].split()
    return int(counted[0]) if counted else 0


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal() and name != _OWN]


def _read(path: str, most_bytes: int | None = None) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            if most_bytes is None:
                return file.read()
            found = bytearray()  # a read returns some lines
            while len(found) < most_bytes and (piece := file.read(_PIECE_BYTES)):
                found += piece
            return bytes(found)
    except OSError:  # it has ended
        return b""
