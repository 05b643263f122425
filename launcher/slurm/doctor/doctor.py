"""Runs `realsys doctor`: verifies that the site matches its file and that a trial can run there.

Checks the local host for every site; on Slurm also what the login node can query (login_checks.py), what
one small job sees on a compute node (node_job.py, node_checks.py) and, on request, the GPUs of whole
nodes (gpu_job.py). Changes nothing except creating the file root; every check has a deadline.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path

from launcher.sites import places
from launcher.sites.clusters import check_store, check_writable
from launcher.sites.site_problems import IMAGES, missing_secrets
from launcher.slurm.doctor import node_probe
from launcher.slurm.doctor.findings import Finding, of_error, unchecked
from launcher.slurm.doctor.gpu_job import GPU_NODES, GpuProbeRequest, gpu_findings
from launcher.slurm.doctor.login_checks import slurm_findings
from launcher.slurm.doctor.node_checks import (
    NEEDED,
    local_python,
    no_pidfd,
    node_findings,
    rule_findings,
    unchecked_node,
)
from launcher.slurm.doctor.node_job import QUEUE_S, NodeJob, NodeReport, node_job, run_node_job
from launcher.slurm.doctor.store_checks import local_store_finding
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.runtime.linux import pidfd_open
from realsys.slurm.containers import image_warnings, missing_files
from realsys.trial.folders import above, check_trial, top_of
from realsys.trial.records import TrialFiles

MOST_TRIALS = 1000  # whose folders are examined
LEAST_FREE_GIB = 5.0  # a checkpoint or two of a small model


def examine(
    spec: ClusterSpec, *, partition: str | None = None, gpu: GpuProbeRequest | None = None
) -> Iterator[Finding]:
    """Yields every finding as soon as it is made.

    Args:
        partition: where the small job and the GPU job run; None: the site's default.
        gpu: which GPU measurements to make; None: none.
    """
    yield from local_findings(spec)
    if spec.scheduler != "slurm":
        yield packages_finding()
        yield from local_kernel_findings()
        if gpu is not None:
            yield from gpu_findings(spec, partition, gpu)
        return
    yield from image_findings(spec)
    try:
        job = node_job(spec, partition)
    except ConfigError as error:
        yield of_error("containers", error)
        return
    login_findings: list[Finding] = []
    for finding in slurm_findings(spec, list(job.request)):
        login_findings.append(finding)
        yield finding
    yield from _there(job, login_findings)
    if gpu is not None:
        if _refused(login_findings):
            why = "Slurm refuses such a job"
            yield from unchecked([GPU_NODES], why, "see slurm and submission")
        else:
            yield from gpu_findings(spec, partition, gpu)


def local_findings(spec: ClusterSpec) -> Iterator[Finding]:
    """Checks the launching host: file root, folders, disk space, name resolution and secrets."""
    try:
        check_writable(spec.file_root)
        yield Finding("file root", True, f"{spec.file_root} can be written")
        yield from folder_findings(spec.file_root)
        yield space_finding(spec.file_root)
        check_store(spec)
        yield local_store_finding(spec)
    except ClusterError as error:
        yield of_error("file root", error)
    for problem in missing_secrets(spec, os.environ):
        yield of_error("secrets", problem)


def folder_findings(root: str) -> Iterator[Finding]:
    """Checks which other users could replace or write trial folders.

    A launch checks the path from its file root to its own folder; this checks all of a user's trials and
    the folders above the file root, which no launch checks. Nothing is changed.
    """
    own, user = Path(root), places.user_name()
    wrong: dict[str, ClusterError] = {}  # by folder: many trials share one
    for plan in islice((own / "runs" / user).glob("*/*/plan.json"), MOST_TRIALS):
        try:
            check_trial(TrialFiles(plan.parent))
        except ClusterError as error:
            wrong.setdefault(error.where, error)
    if wrong:
        first, *rest = wrong.values()
        more = f" (and {len(rest)} more folders)" if rest else ""
        yield Finding("folders", False, first.what + more, first.fix)
    else:
        yield Finding("folders", True, "no other user can replace or write your trials' folders")
    yield from _above(top_of(own))


def _above(top: Path) -> Iterator[Finding]:
    problems = above(top)
    if any(severe for _, severe in problems):
        what = next(sentence for sentence, severe in problems if severe)
        fix = "ask its owner for chmod +t, or use a file root elsewhere (REALSYS_FILE_ROOT)"
        yield Finding("folders above", False, what, fix)
    elif problems:
        yield Finding("folders above", True, "; ".join(sentence for sentence, _ in problems))


def space_finding(root: str) -> Finding:
    """Checks that the file system has enough free space for a run."""
    existing = next(path for path in (Path(root), *Path(root).parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    fix = "make room, or set REALSYS_FILE_ROOT to a folder on a larger disk"
    return Finding("disk space", free >= LEAST_FREE_GIB, f"{free:.0f} GiB free", fix)


def packages_finding() -> Finding:
    """Checks that the packages a worker needs are installed on this host."""
    found = {name: _version(name) for name in NEEDED}
    lacks = [name for name, version in found.items() if version is None]
    if lacks:
        fix = "to run workers on this machine: pip install 'realsys[train]'"
        return Finding("packages", False, f"not installed: {', '.join(lacks)}", fix)
    return Finding("packages", True, f"Python {local_python()}, torch {found['torch']}")


def local_kernel_findings() -> Iterator[Finding]:
    """Checks this host's kernel, if tasks run here; yields nothing if it has what they need."""
    try:
        os.close(pidfd_open(os.getpid()))
    except ClusterError:
        yield no_pidfd("kernel", platform.release())
    yield from rule_findings("reward rules", node_probe.walls())


def image_findings(spec: ClusterSpec) -> Iterator[Finding]:
    """Checks that image files exist, and warns of image names that can change their content."""
    for where in IMAGES:
        image = getattr(spec, where)
        problems = missing_files(spec.container, image, where=where, exists=os.path.exists)
        found = [of_error(where, problem) for problem in problems]
        for warning in image_warnings(spec.container, image, where=where):
            what, _, fix = warning.partition("; ")
            found.append(Finding(where, False, what, fix or "see docs/site_files.md"))
        if image is not None:
            yield from found or [Finding(where, True, image)]


def _there(job: NodeJob, login_findings: list[Finding]) -> Iterator[Finding]:
    """Runs the node job and yields its findings; skipped if Slurm already refused such a job."""
    again = "or look at another partition: --partition"
    if refused := _refused(login_findings):
        yield from unchecked_node(job, refused[0].what, refused[0].fix)
        return
    try:
        seen = run_node_job(job)
    except (
        ClusterError
    ) as error:  # Slurm accepted the job moments ago, so no node became free in time
        what = f"no node was free within {QUEUE_S} s ({error.what})"
        yield from unchecked_node(job, what, f"try again later, {again}")
    except OSError as error:
        what = f"the file root can't be written: {error}"
        yield from unchecked_node(job, what, f"try again when a node is free, {again}")
    else:
        yield from node_findings(job, with_write_visibility(job, seen))


def _refused(login_findings: list[Finding]) -> list[Finding]:
    return [f for f in login_findings if f.name in ("slurm", "submission") and not f.ok]


def with_write_visibility(job: NodeJob, seen: dict[str, NodeReport]) -> dict[str, NodeReport]:
    """Adds to the reports whether the file written by the node is visible here, and removes that file."""
    answer = Path(job.spec.file_root, f"{job.probe_file}.node")
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
