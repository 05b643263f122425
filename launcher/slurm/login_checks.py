"""What can be found out from the login node: Slurm, its accounting, partitions, and our place in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from launcher.slurm.commands import run_slurm, said
from launcher.slurm.discover import Discovered, ask
from launcher.slurm.findings import Finding, of_error, unchecked
from launcher.slurm.images import PROGRAMS
from launcher.slurm.refusals import refusal
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ClusterError

OLDEST = (22, 5)
NAMES = ("accounting", "partitions", "container runtime", "submission")


def slurm_findings(spec: ClusterSpec, request: list[str]) -> Iterator[Finding]:
    """All of them; if Slurm does not answer, the others as not checked.

    Args:
        request: options of a small job, as the site's jobs would have them.
    """
    try:
        site = ask(spec.name)
    except ClusterError as error:
        yield of_error("slurm", error)
        yield from unchecked(NAMES, "Slurm does not answer", error.fix)
        return
    yield version_finding(site.version)
    yield accounting_finding(spec, site)
    yield from partition_findings(spec, site)
    if spec.container.runtime != "none":
        yield runtime_finding(spec, site)
    yield submission_finding(request)


def version_finding(version: str) -> Finding:
    """Whether this Slurm is new enough."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        return Finding("slurm", False, f"Slurm {version} answers", "realsys needs 22.05 or later")
    return Finding("slurm", True, f"Slurm {version} answers")


def accounting_finding(spec: ClusterSpec, site: Discovered) -> Finding:
    """Whether sacct works, and whether the site file says so."""
    said_so, is_so = spec.slurm.accounting, site.spec.slurm.accounting
    name = "accounting"
    if not is_so:
        if said_so:
            return Finding(name, False, "Slurm keeps no accounting", "set slurm.accounting: false")
        return Finding(name, True, "none; states come from squeue and the trials' own records")
    try:
        done = run_slurm(
            ["sacct", "--noheader", "--allocations", "--starttime=now", "--format=JobID"],
            timeout_s=20,
        )
    except ClusterError as error:
        return of_error(name, error)
    if done.returncode != 0:
        return Finding(
            name,
            False,
            f"sacct fails: {said(done.stderr)}",
            "set slurm.accounting: false, or ask the site",
        )
    if said_so is False:
        return Finding(name, True, "sacct works; the site file says not to use it")
    return Finding(name, True, "sacct works")


def partition_findings(spec: ClusterSpec, site: Discovered) -> Iterator[Finding]:
    """Whether the partitions of the site file are there and have what it promises (pure)."""
    there = site.spec.partitions
    wanted = spec.slurm.partition
    if wanted and wanted not in {*spec.partitions, *there}:
        yield Finding(
            f"partition {wanted}",
            False,
            "Slurm has no such partition",
            f"set slurm.partition to one of {', '.join(there)}",
        )
    for name, described in spec.partitions.items():
        if name not in there:
            yield Finding(
                f"partition {name}",
                False,
                "Slurm has no such partition",
                f"remove it from partitions; there are {', '.join(there)}",
            )
            continue
        lacks = list(_lacks(described, there[name]))
        fix = "compare with `realsys clusters init`, and correct the site file"
        if lacks:
            yield Finding(f"partition {name}", False, "; ".join(lacks), fix)
        else:
            yield Finding(f"partition {name}", True, _has(described))
    if not spec.partitions:
        yield Finding(
            "partitions",
            False,
            "the site file describes none, so plans can't be checked before they are queued",
            "take them from `realsys clusters init`",
        )


def _lacks(said_so: PartitionSpec, is_so: PartitionSpec) -> Iterator[str]:
    for option in ("nodes", "cpus", "memory_mib", "gpus"):
        promised, found = getattr(said_so, option), getattr(is_so, option)
        if promised is not None and found is not None and promised > found:
            yield f"{option} is {promised} in the site file, Slurm says {found}"
    if said_so.gpu_type and is_so.gpu_type and said_so.gpu_type != is_so.gpu_type:
        yield f"gpu_type is {said_so.gpu_type} in the site file, Slurm says {is_so.gpu_type}"


def _has(spec: PartitionSpec) -> str:
    nodes = f"{spec.nodes} nodes, each " if spec.nodes else "each node "
    gpus = f", {spec.gpus} × {spec.gpu_type or 'gpu'}" if spec.gpus else ""
    return f"{nodes}{spec.cpus} CPUs, {spec.memory_mib} MiB{gpus}"


def runtime_finding(spec: ClusterSpec, site: Discovered) -> Finding:
    """Whether jobs can be given images from here."""
    runtime, name = spec.container.runtime, "container runtime"
    program = PROGRAMS[runtime]
    here = f"{program} is on PATH here"
    if not shutil.which(program):
        here = f"no {program} on this host: `realsys image pull` must run elsewhere"
    if runtime == "pyxis" and site.spec.container.runtime != "pyxis":
        return Finding(
            name,
            False,
            "this srun has no --container-image",
            "pyxis is not installed, or was built for another Slurm: ask the site; or set "
            "container.runtime: apptainer",
        )
    return Finding(
        name, True, ("srun takes --container-image; " if runtime == "pyxis" else "") + here
    )


def submission_finding(request: list[str]) -> Finding:
    """Whether Slurm would take a job of ours: account, QOS, partition, limits."""
    try:
        done = run_slurm(["sbatch", "--test-only", *request, "--wrap=true"], timeout_s=30)
    except ClusterError as error:
        return of_error("submission", error)
    if done.returncode != 0:
        return of_error("submission", refusal(done.stderr, where="sbatch --test-only"))
    answer = (done.stderr or done.stdout).strip().splitlines()
    return Finding(
        "submission", True, answer[-1].removeprefix("sbatch: ") if answer else "accepted"
    )
