"""Whether memory ran out while a process ran, by the kernel's own counters.

SIGKILL does not show who sent it. The kernel counts the processes it killed for lack of memory: for
a cgroup in ``memory.events`` (v2) or ``memory.oom_control`` (v1), for the whole machine in
``/proc/vmstat``; all of them world-readable. For the parents of workers, which compare the counters
before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LIMIT = "its cgroup's memory limit"
_MACHINE = "the node's memory"
_UNLIMITED = 1 << 60  # bytes; larger than any configured limit


@dataclass(frozen=True, kw_only=True)
class OomCounts:
    """Processes killed for lack of memory so far; None if the kernel does not report it."""

    cgroup: int | None
    machine: int | None
    limit: int | None = (
        None  # bytes: the smallest of the cgroup's and its parents'; None: unlimited
    )


def read_oom_counts(root: Path = Path("/")) -> OomCounts:
    """Reads the counters of this process's cgroup, which its children share, and of the machine."""
    for top, folder, events in _memory_cgroups(root):
        if (count := _counted(folder / events, "oom_kill")) is not None:
            limit = _effective_limit(top, folder)
            break
    else:
        count, limit = None, None
    return OomCounts(cgroup=count, machine=_counted(root / "proc/vmstat", "oom_kill"), limit=limit)


def oom_evidence(before: OomCounts, after: OomCounts) -> str:
    """Returns what the counters prove, as part of a sentence; "" if nothing. Pure."""
    if before.cgroup is not None and (after.cgroup or 0) > before.cgroup:
        limit = "" if after.limit is None else f" of {after.limit >> 20} MiB"
        return f"{_LIMIT}{limit} ran out (oom_kill {before.cgroup} → {after.cgroup})"
    if before.machine is not None and (after.machine or 0) > before.machine:
        return f"{_MACHINE} ran out (oom_kill {before.machine} → {after.machine})"
    return ""


def memory_fix(evidence: str, worker_type: str, *, on_slurm: bool, trial: str = "TRIAL") -> str:
    """Returns what to do about text from ``oom_evidence``, possibly part of a longer one; "" if it
    contains none. Pure."""
    command = f"realsys resume {trial} scheduling.{worker_type}.mem=MIB"
    if _LIMIT in evidence and on_slurm:
        return (
            f"resume with more memory: {command} (for each task; the job requests the sum of its tasks "
            "on a node, and they share it)"
        )
    if _LIMIT in evidence:
        return "raise the memory limit of this container or session, or train with less at a time"
    if _MACHINE in evidence and on_slurm:
        return f"{command}, as large as the tasks really need, so that fewer share a node"
    return (
        "free memory of this machine, or train with less at a time" if _MACHINE in evidence else ""
    )


def _effective_limit(top: Path, folder: Path) -> int | None:
    """Returns the smallest limit of the cgroup and its parents: a step's own may be unlimited while
    its job's is not. Version 1 writes "unlimited" as a number near 2^63, version 2 as ``max``."""
    limits = []
    while folder != top and top in folder.parents:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _first_line(folder / name)
            limits += [int(text)] if text.isdecimal() else []
        folder = folder.parent
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def _memory_cgroups(root: Path) -> list[tuple[Path, Path, str]]:
    """Returns (mount, folder, file of events) of the cgroups that may limit this process's memory;
    cgroups(7)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            top = root / "sys/fs/cgroup"
            found.append((top, top / relative, "memory.events"))
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            found.append((top, top / relative, "memory.oom_control"))
    return found


def _counted(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""
