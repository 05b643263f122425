"""The processes of one cluster on this machine, told apart from those of any other.

A daemon, client or job knows its cluster by SLURM_CONF in its environment. slurmstepd and slurmscriptd
write their titles over theirs, but hold a log in the cluster's folder open. A job's process may
have dropped both, and is then known by its cgroup, where there is one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

FREEZER = Path("/sys/fs/cgroup/freezer")
_JOB_CGROUP = re.compile(r"/slurm_[^/]+/uid_\d+/job_(\d+)")


def pids_of_cluster(slurm_conf: Path, runs: Callable[[int], bool]) -> set[int]:
    """All but this process and its ancestors.

    Args:
        slurm_conf: the cluster's, in a folder ``etc`` of the cluster's folder.
        runs: whether a job id is of the cluster.
    """
    entry = f"SLURM_CONF={slurm_conf}".encode()
    folder = f"{slurm_conf.parents[1]}/"
    ours = set(_ancestors(os.getpid()))
    return {
        pid
        for pid in _pids()
        if pid not in ours
        and (
            entry in environment_of(pid)
            or any(path.startswith(folder) for path in _open_files(pid))
            or any(runs(job_id) for job_id in _cgroup_jobs(pid))
        )
    }


def pids_of_job(slurm_conf: Path, job_id: int) -> set[int]:
    """What a job has started, by environment or cgroup; Slurm's own slurmstepd left out."""
    entries = {f"SLURM_CONF={slurm_conf}".encode(), f"SLURM_JOB_ID={job_id}".encode()}
    return {
        pid
        for pid in _pids()
        if (entries <= environment_of(pid) or job_id in _cgroup_jobs(pid))
        and not _program(pid).startswith("slurmstepd")  # Debian: slurmstepd-wlm
    }


def node_of(pid: int) -> str | None:
    """The node that a job's process or slurmstepd is on."""
    name = b"SLURMD_NODENAME="
    for entry in environment_of(pid):
        if entry.startswith(name):
            return entry.removeprefix(name).decode()
    logs = (re.search(r"/log/slurmd\.([^/]+)\.log$", path) for path in _open_files(pid))
    return next((log[1] for log in logs if log), None)


def environment_of(pid: int) -> frozenset[bytes]:
    """The ``NAME=value`` that a process was started with; none when it is gone."""
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()


def kill_all(find: Callable[[], set[int]], *, timeout_s: float = 240) -> None:
    """SIGKILL to what ``find`` returns, until it returns nothing: some start others meanwhile."""
    deadline = time.monotonic() + timeout_s
    while pids := {pid for pid in find() if not _is_zombie(pid)}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(pids)} outlive SIGKILL")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def remove_cgroups(runs: Callable[[int], bool]) -> None:
    """The empty cgroups that killed slurmstepds leave."""
    for job in FREEZER.glob("slurm_*/uid_*/job_*"):
        if runs(int(job.name.removeprefix("job_"))):
            for folder, _, _ in os.walk(job, topdown=False):
                with suppress(OSError):  # not yet empty: the kernel is still at it
                    os.rmdir(folder)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _ancestors(pid: int) -> Iterator[int]:
    while pid:
        yield pid
        pid = int(_status(pid)[1]) if _status(pid) else 0


def _status(pid: int) -> list[str]:
    """State, parent and on, of /proc/PID/stat (man proc); empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    return _status(pid)[:1] in ([], ["Z"], ["X"])


def _program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def _open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def _cgroup_jobs(pid: int) -> set[int]:
    try:
        return {int(n) for n in _JOB_CGROUP.findall(Path(f"/proc/{pid}/cgroup").read_text())}
    except OSError:
        return set()
