"""Threads of a core and DefaultTime of each partition, from Slurm, where the site file does not say.

One sinfo when a plan is made; no answer is no error, since plans are made without a Slurm, too.
"""

from __future__ import annotations

import re
from dataclasses import replace

from launcher.slurm.slurm_commands import run_slurm
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError

PATIENCE_S = 10
SINFO_FORMAT = "%R|%c|%z|%L"  # partition, CPUs, sockets:cores:threads, DefaultTime


def with_threads(spec: ClusterSpec) -> ClusterSpec:
    """The site with ``threads_per_core`` in every partition that Slurm knows, and ``default_time``."""
    unknown = [name for name, p in spec.partitions.items() if p.threads_per_core is None]
    if spec.scheduler != "slurm" or not unknown:
        return spec
    argv = ["sinfo", "--noheader", "--exact", f"--format={SINFO_FORMAT}"]
    try:
        done = run_slurm(argv, timeout_s=PATIENCE_S)
    except ClusterError:
        return spec
    said = done.stdout if done.returncode == 0 else ""
    threads, times = threads_by_partition(said), default_times(said)
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
    """Of sinfo's lines in SINFO_FORMAT; where nodes differ, the most (pure)."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 4 and (threads := threads_of(fields[1], fields[2])):
            found[fields[0]] = max(threads, found.get(fields[0], 1))
    return found


def default_times(text: str) -> dict[str, str]:
    """Of the same lines: what a job gets that names no limit; none where that is MaxTime (pure)."""
    rows = (line.strip().split("|") for line in text.splitlines())
    return {row[0]: row[3] for row in rows if len(row) == 4 and row[3][:1].isdigit()}


def threads_of(cpus: str, shape: str) -> int | None:
    """CPUs of a core, of sinfo's %c and %z (``16``, ``2:4:2``); None where they can't be read (pure).

    Not the last number: at a site that counts a core as one CPU (``CPUs=8``), it is 1.
    """
    numbers = re.findall(r"\d+", shape)
    all_cpus = re.match(r"\d+", cpus)
    if len(numbers) != 3 or all_cpus is None:
        return None
    cores = int(numbers[0]) * int(numbers[1])
    return max(1, -(-int(all_cpus[0]) // cores)) if cores else None
