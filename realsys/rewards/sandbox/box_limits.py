"""What a box is given and what comes back: limits, and the outcome of the program that ran in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from realsys.api.errors import ConfigError

# Why a box ended. "exit": its program exited; "signal": its program died by a signal that the box
# did not send; otherwise the limit that the box enforced by killing everything in it.
Ended = Literal["exit", "signal", "wall_time", "cpu_time", "memory", "processes", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxLimits:
    """Limits of one box. All processes of the box share them, except where one process is named."""

    wall_s: float = 10.0  # from the program's start to the kill; without the start of the box
    cpu_s: float = 10.0  # of all processes together
    memory_bytes: int = (
        512 << 20
    )  # of all processes, with page tables, pipes and sockets; of each its own
    processes: int = 32  # processes and threads at a time
    output_bytes: int = 1 << 20  # of standard output, and again of standard error
    file_bytes: int = 64 << 20  # written under all writable folders together; held in memory
    files: int = 4096  # files and folders there
    open_files: int = 64  # descriptors of one process

    def __post_init__(self) -> None:
        if bad := {f.name: n for f in fields(self) if (n := getattr(self, f.name)) <= 0}:
            raise ConfigError(
                f"limits of a sandbox must be above 0: {bad}",
                where="limits",
                fix="give a large number for a limit that should not matter",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxOutcome:
    """What the program in a box did. A box that failed itself has no outcome: see SandboxFailure."""

    ended: Ended
    exit_code: int | None  # None unless ``ended`` is "exit"; 127: no such program
    signal: int | None  # None unless ``ended`` is "signal"
    stdout: bytes  # at most ``output_bytes``
    stderr: bytes
    wall_s: float
    cpu_s: float  # user and system time of all its processes that were waited for
    files: Mapping[str, bytes] = field(default_factory=dict)  # those asked for that are there
    archive: bytes | None = field(default=None, repr=False)  # of folders; None: can't be packed

    @property
    def succeeded(self) -> bool:
        """Whether the program exited with status 0."""
        return self.ended == "exit" and self.exit_code == 0
