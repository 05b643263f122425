"""What processes ask of a folder's file system: calls and new files, by process.

For the tests of both schedulers' trials, tests/unit/trial/test_nfs.py and benchmarks/bench_file_calls.py. A
small library (file_calls.c, compiled by gcc) is loaded into every process that inherits ``environment`` and
counts there; nothing is slowed down as under a tracer. It can also make the folder behave as one on NFS
where each process is a host of its own.
"""

from __future__ import annotations

import shlex
import struct
from dataclasses import dataclass, fields
from pathlib import Path

import forked
from real_trials import Trials

_COUNTS = struct.Struct("8L")


@dataclass(frozen=True)
class Counts:
    """As file_calls.c has them; ``calls`` is the sum of all from ``opens`` on."""

    calls: int = 0
    new_files: int = 0
    opens: int = 0
    looks: int = 0  # access, stat, readlink
    reads: int = 0
    writes: int = 0
    changes: int = 0  # of names, locks, times; syncs
    closes: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class FileCalls:
    """Counts calls to files under ``under``; ``scratch`` is a folder of its own, elsewhere.

    Args:
        as_nfs: ``under`` seems to be a mounted NFS export, and each process another host.
    """

    def __init__(self, under: Path, scratch: Path, *, as_nfs: bool = False) -> None:
        self._to = scratch / "counts"
        self._to.mkdir(parents=True)
        self.environment = {
            "LD_PRELOAD": str(forked.library() or forked.compile_library(scratch)),
            "COUNT_FILES_UNDER": str(under.resolve()),
            "COUNT_FILES_TO": str(self._to),
        }
        if as_nfs:
            mounts = scratch / "mountinfo"
            mounts.write_text(
                "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                f"30 20 0:40 / {under.resolve()} rw - nfs4 server:/export rw\n"
            )
            self.environment["STAND_IN_MOUNTS"] = str(mounts)

    @property
    def setup(self) -> list[str]:
        """The same as lines of a site file's ``setup``: a job's supervisor, sruns and tasks count."""
        return [f"export {name}={shlex.quote(v)}" for name, v in self.environment.items()]

    def by_process(self) -> dict[int, Counts]:
        """Counts so far, by pid, of all that ever ran."""
        found = {}
        for file in self._to.iterdir():
            data = file.read_bytes()
            if len(data) > _COUNTS.size:
                found[int(file.name)] = Counts(*_COUNTS.unpack_from(data))
        return found

    def program(self, pid: int) -> str:
        """What a process was started as."""
        data = (self._to / str(pid)).read_bytes()[_COUNTS.size :]
        return data.partition(b"\0")[0].decode(errors="replace")


class CountedTrials(Trials):
    """Trials under ``folder``, all of whose processes count."""

    def __init__(self, folder: Path, *, as_nfs: bool) -> None:
        self.file_root = folder / "root"
        self.file_root.mkdir(parents=True)
        self.calls = FileCalls(self.file_root, folder / "scratch", as_nfs=as_nfs)

    @property
    def outside(self) -> dict[str, str]:
        return {**super().outside, **self.calls.environment}


def since(before: dict[int, Counts], after: dict[int, Counts]) -> dict[int, Counts]:
    """What each process has done between two ``by_process``."""
    return {pid: counts - before.get(pid, Counts()) for pid, counts in after.items()}


def total(by_process: dict[int, Counts]) -> Counts:
    """Of all processes."""
    return sum(by_process.values(), Counts())
