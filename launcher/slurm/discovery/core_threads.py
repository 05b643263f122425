"""Fills in threads per core and DefaultTime of partitions from sinfo, if the site file lacks them.

Runs one sinfo per plan. A missing answer is no error, because plans are also made on hosts without Slurm.
"""

from __future__ import annotations

import re
from dataclasses import replace

from launcher.slurm.slurm_commands import run_slurm
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError

SINFO_TIMEOUT_S = 10
SINFO_FORMAT = "%R|%c|%z|%L"  # partition, CPUs, sockets:cores:threads, DefaultTime


def with_threads(spec: ClusterSpec) -> ClusterSpec:
    """Returns the site with ``threads_per_core`` and ``default_time`` filled in for every partition that
    sinfo lists.
    """
    unknown = [name for name, p in spec.partitions.items() if p.threads_per_core is None]
    if spec.scheduler != "slurm" or not unknown:
        return spec
    argv = ["sinfo", "--noheader", "--exact", f"--format={SINFO_FORMAT}"]
    try:
        done = run_slurm(argv, timeout_s=SINFO_TIMEOUT_S)
    except ClusterError:
        return spec
    known = seen_by_partition(done.stdout if done.returncode == 0 else "")
    measured = {
        name: replace(
            spec.partitions[name],
            threads_per_core=known[name][0],
            default_time=spec.partitions[name].default_time or known[name][1],
        )
        for name in unknown
        if name in known
    }
    return replace(spec, partitions={**spec.partitions, **measured})


def seen_by_partition(text: str) -> dict[str, tuple[int, str | None]]:
    """Parses (threads per core, DefaultTime) by partition from sinfo's lines in SINFO_FORMAT; mixed nodes
    give the most threads, and without a DefaultTime MaxTime holds (pure).
    """
    found: dict[str, tuple[int, str | None]] = {}
    for row in (line.strip().split("|") for line in text.splitlines()):
        if len(row) == 4 and (threads := threads_of(row[1], row[2])):
            most = max(threads, found.get(row[0], (1, None))[0])
            found[row[0]] = most, row[3] if row[3][:1].isdigit() else None
    return found


def threads_of(cpus: str, shape: str) -> int | None:
    """Computes CPUs per core from sinfo's %c and %z (``16``, ``2:4:2``); None if unreadable (pure).

    The last number of %z is not it: a site that counts each core as one CPU (``CPUs=8``) has 1.
    """
    numbers = re.findall(r"\d+", shape)
    all_cpus = re.match(r"\d+", cpus)
    if len(numbers) != 3 or all_cpus is None:
        return None
    cores = int(numbers[0]) * int(numbers[1])
    return max(1, -(-int(all_cpus[0]) // cores)) if cores else None
