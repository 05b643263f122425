"""Whether memory ran out while a process lived, from the kernel's own counts.

SIGKILL says nothing about who sent it. The kernel counts what it killed for lack of memory: for a cgroup
in ``memory.events`` (v2) or ``memory.oom_control`` (v1), for the whole machine in ``/proc/vmstat``; all of
it readable by anybody. For the parents of workers, which look before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class OomCounts:
    """Processes killed for lack of memory so far; None where the kernel does not say."""

    cgroup: int | None
    machine: int | None
    limit: str = ""  # the cgroup's memory limit as its file says it


def read_oom_counts(root: Path = Path("/")) -> OomCounts:
    """Counts of this process's cgroup, which its children share, and of the machine."""
    for folder, events in _memory_cgroups(root):
        if (count := _counted(folder / events, "oom_kill")) is not None:
            limit = _first_line(folder / "memory.max") or _first_line(
                folder / "memory.limit_in_bytes"
            )
            break
    else:
        count, limit = None, ""
    return OomCounts(cgroup=count, machine=_counted(root / "proc/vmstat", "oom_kill"), limit=limit)


def oom_evidence(before: OomCounts, after: OomCounts) -> str:
    """What the counts prove, as part of a sentence; "" when they prove nothing. Pure."""
    if before.cgroup is not None and (after.cgroup or 0) > before.cgroup:
        limit = f" of {int(after.limit) / 2**30:.1f} GiB" if after.limit.isdecimal() else ""
        return (
            f"its cgroup's memory limit{limit} ran out (oom_kill {before.cgroup} → {after.cgroup})"
        )
    if before.machine is not None and (after.machine or 0) > before.machine:
        return f"the node's memory ran out (oom_kill {before.machine} → {after.machine})"
    return ""


def _memory_cgroups(root: Path) -> list[tuple[Path, str]]:
    """(folder, file of events) of the cgroups that may limit our memory; cgroups(7)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            found.append((root / "sys/fs/cgroup" / relative, "memory.events"))
        elif "memory" in controllers.split(","):
            found.append((root / "sys/fs/cgroup/memory" / relative, "memory.oom_control"))
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
