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
    output = done.stdout if done.returncode == 0 else ""
    threads, times = threads_by_partition(output), default_times(output)
    measured = {
        name: replace(
            spec.partitions[name],
            threads_per_core=threads[name],
            default_time=spec.partitions[name].default_time or times.get(name),
        )
        for name in unknown
        if name in threads
    }
    return replace(spec, partitions={**spec.partitions, **measured})


def threads_by_partition(text: str) -> dict[str, int]:
    """Parses threads per core by partition from sinfo's lines in SINFO_FORMAT; mixed nodes give the
    maximum (pure).
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 4 and (threads := threads_of(fields[1], fields[2])):
            found[fields[0]] = max(threads, found.get(fields[0], 1))
    return found


def default_times(text: str) -> dict[str, str]:
    """Parses DefaultTime by partition from the same lines; partitions without one are left out, MaxTime
    holds there (pure).
    """
    rows = (line.strip().split("|") for line in text.splitlines())
    return {row[0]: row[3] for row in rows if len(row) == 4 and row[3][:1].isdigit()}


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
