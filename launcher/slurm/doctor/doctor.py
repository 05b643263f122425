"""`realsys doctor`: is the site as its file says, and can a trial run there?

Checks of this host for every site; for Slurm also what the login node can ask (login_checks.py) and
what one small job sees on a compute node (node_job.py, node_checks.py), and where asked what whole nodes'
GPUs do (gpu_job.py). It changes nothing
(but makes the file root), and every check has a deadline.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from launcher.sites.clusters import check_store, check_writable
from launcher.sites.site_problems import IMAGES, missing_secrets
from launcher.slurm.doctor.findings import Finding, of_error, unchecked
from launcher.slurm.doctor.folder_checks import folder_findings
from launcher.slurm.doctor.gpu_job import GPU_NODES, GpuQuestion, gpu_findings
from launcher.slurm.doctor.kernel_checks import kernel_here
from launcher.slurm.doctor.login_checks import slurm_findings
from launcher.slurm.doctor.node_checks import NEEDED, node_findings, not_looked, python_here
from launcher.slurm.doctor.node_job import QUEUE_S, NodeJob, NodeReport, look, node_job
from launcher.slurm.doctor.store_checks import store_finding
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.slurm.containers import image_warnings, missing_files

LEAST_FREE_GIB = 5.0  # a checkpoint or two of a small model


def examine(
    spec: ClusterSpec, *, partition: str | None = None, gpu: GpuQuestion | None = None
) -> Iterator[Finding]:
    """Every finding, as it is made.

    Args:
        partition: of the small job, and of that which measures GPUs; else the site's default.
        gpu: what is to be measured of GPUs; None: nothing.
    """
    yield from here_findings(spec)
    if spec.scheduler != "slurm":
        yield packages_finding()
        yield from kernel_here()
        if gpu is not None:
            yield from gpu_findings(spec, partition, gpu)
        return
    yield from image_findings(spec)
    try:
        job = node_job(spec, partition)
    except ConfigError as error:
        yield of_error("containers", error)
        return
    asked: list[Finding] = []
    for finding in slurm_findings(spec, list(job.request)):
        asked.append(finding)
        yield finding
    yield from _there(job, asked)
    if gpu is not None:
        if _refused(asked):
            why = "Slurm would take no job"
            yield from unchecked([GPU_NODES], why, "see slurm and submission")
        else:
            yield from gpu_findings(spec, partition, gpu)


def here_findings(spec: ClusterSpec) -> Iterator[Finding]:
    """Of the host that launches."""
    try:
        check_writable(spec.file_root)
        yield Finding("file root", True, f"{spec.file_root} can be written")
        yield from folder_findings(spec.file_root)
        yield space_finding(spec.file_root)
        check_store(spec)
        yield store_finding(spec)
    except ClusterError as error:
        yield of_error("file root", error)
    for problem in missing_secrets(spec, os.environ):
        yield of_error("secrets", problem)


def space_finding(root: str) -> Finding:
    """Whether the file system has room for a run."""
    existing = next(path for path in (Path(root), *Path(root).parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    fix = "make room, or set REALSYS_FILE_ROOT to a folder on a larger disk"
    return Finding("disk space", free >= LEAST_FREE_GIB, f"{free:.0f} GiB free", fix)


def packages_finding() -> Finding:
    """Whether the packages of a worker are installed here."""
    found = {name: _version(name) for name in NEEDED}
    lacks = [name for name, version in found.items() if version is None]
    if lacks:
        fix = "to run workers on this machine: pip install 'realsys[train]'"
        return Finding("packages", False, f"not installed: {', '.join(lacks)}", fix)
    return Finding("packages", True, f"Python {python_here()}, torch {found['torch']}")


def image_findings(spec: ClusterSpec) -> Iterator[Finding]:
    """Whether images that are files are there, and names that will not stay what they are."""
    for where in IMAGES:
        image = getattr(spec, where)
        problems = missing_files(spec.container, image, where=where, exists=os.path.exists)
        found = [of_error(where, problem) for problem in problems]
        for warning in image_warnings(spec.container, image, where=where):
            what, _, fix = warning.partition("; ")
            found.append(Finding(where, False, what, fix or "see docs/site_files.md"))
        if image is not None:
            yield from found or [Finding(where, True, image)]


def _there(job: NodeJob, asked: list[Finding]) -> Iterator[Finding]:
    """What the job sees; none is asked for where Slurm has refused it already."""
    if refused := _refused(asked):
        error = ClusterError(refused[0].what, where=refused[0].name, fix=refused[0].fix)
        yield from not_looked(job, error)
        return
    try:
        seen = look(job)
    except ClusterError as error:
        yield from not_looked(job, _no_node(error))
    except OSError as error:
        problem = ClusterError(
            f"the file root can't be written: {error}", where=job.spec.file_root, fix=""
        )
        yield from not_looked(job, problem)
    else:
        yield from node_findings(job, with_answer(job, seen))


def _refused(asked: list[Finding]) -> list[Finding]:
    return [f for f in asked if f.name in ("slurm", "submission") and not f.ok]


def _no_node(error: ClusterError) -> ClusterError:
    """Slurm took the job a moment ago, so what went wrong now is that no node was free in time."""
    return ClusterError(
        f"no node was free within {QUEUE_S} s ({error.what})",
        where=error.where,
        fix="try again later, or look at another partition: --partition",
    )


def with_answer(job: NodeJob, seen: dict[str, NodeReport]) -> dict[str, NodeReport]:
    """The reports, with whether the file that the node wrote is seen here; removes it."""
    answer = Path(job.spec.file_root, f"{job.canary}.node")
    try:
        seen_back = answer.read_text(encoding="utf-8") == job.token[::-1]
        answer.unlink()
    except OSError:
        seen_back = False
    host = seen.get("host")
    if host is None or host.report is None:
        return seen
    shared = {**host.report["shared"], "seen_back": seen_back}
    return {**seen, "host": replace(host, report={**host.report, "shared": shared})}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
