"""Measures all GPUs of whole nodes, and the network between them, for `realsys doctor --gpu`.

Makes one allocation, in which realsys/slurm/preflight/drive.py runs on the login node and starts the
steps; on a machine without Slurm the same program runs locally. realsys/slurm/preflight/node_verdicts.py
evaluates the results.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import realsys
from launcher.slurm.doctor.findings import Finding
from launcher.slurm.doctor.node_job import QUEUE_S, run_in_job, site_request, why_not
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ClusterError, ConfigError
from realsys.slurm.hostlist import compress, expand
from realsys.slurm.preflight.drive import ProbeTarget, examine, place_of
from realsys.slurm.preflight.node_records import ProbeRecords, StepSeen
from realsys.slurm.preflight.node_verdicts import Check, judge, to_leave_out
from realsys.slurm.preflight.rounds import Wanted
from realsys.trial.folders import make_folders
from realsys.worker.machine_gpus import machine_gpus

GPU_NODES = "GPU nodes"  # the finding's name if nothing could be measured
MIB_PER_PROCESS = 4096  # of host memory: torch, CUDA's context, NCCL's buffers
CPU_PROCESSES = 2  # per node, if GPUs are not used
ALLOCATION_S = 90.0  # for Slurm to grant and release the job, in addition to the steps' time


@dataclass(frozen=True, kw_only=True)
class GpuProbeRequest:
    """The GPU measurements requested with `realsys doctor --gpu`.

    Attributes:
        nodes: number of nodes; None: two, or one if the partition has one.
        nodelist: measure these nodes.
        gloo: measure on CPUs with gloo.
    """

    nodes: int | None = None
    nodelist: str | None = None
    gloo: bool = False


def gpu_findings(
    spec: ClusterSpec, partition: str | None, probe: GpuProbeRequest
) -> Iterator[Finding]:
    """Runs the GPU job and yields its findings."""
    try:
        wanted, seen = _look(spec, partition, probe)
    except (ClusterError, ConfigError) as error:
        fix = error.fix or "try again later"
        yield Finding(GPU_NODES, None, f"not checked: {error.what}", fix)
        return
    checks = judge(wanted, seen)
    for check in checks:
        yield Finding(check.name, check.ok, check.what, check.fix or "see the lines above")
    yield outliers(checks, wanted)


def outliers(checks: list[Check], wanted: Wanted) -> Finding:
    """Names the nodes to leave out, as an --exclude option (pure)."""
    outlying = to_leave_out(checks, wanted.nodes)
    if outlying:
        hosts = compress(sorted(outlying))
        why = "; ".join(f"{node} ({why})" for node, why in sorted(outlying.items()))
        return Finding(
            "outliers", False, why, f"leave them out until they are repaired: --exclude {hosts}"
        )
    if any(check.ok is False for check in checks):
        fix = "see the fixes of the lines above"
        return Finding(
            "outliers", None, "no node differs from the others: the cause is the whole site", fix
        )
    return Finding("outliers", True, f"none of {len(wanted.nodes)}")


def max_gpu_probe_s(spec: ClusterSpec, partition: str | None, probe: GpuProbeRequest) -> float:
    """Returns the longest time the measurement may take in seconds, without the wait for nodes."""
    return _wanted(spec, partition, probe, lock="").longest_s


def gpu_request(spec: ClusterSpec, partition: str | None, probe: GpuProbeRequest) -> list[str]:
    """Builds salloc's options of the GPU job: all GPUs of each node (pure)."""
    described = _described(spec, partition)
    wanted = _wanted(spec, partition, probe, lock="")
    cpus = min(described.cpus, 2 * wanted.processes)
    memory = min(described.memory_mib, MIB_PER_PROCESS * wanted.processes)
    found = site_request(spec, partition)
    found += [f"--nodes={len(wanted.nodes)}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    found += [f"--mem={memory}M", f"--time={int(wanted.longest_s // 60) + 2}"]
    if probe.nodelist:
        found.append(f"--nodelist={probe.nodelist}")
    if described.gpus:
        kind = f"{described.gpu_type}:" if described.gpu_type else ""
        found.append(f"--gres=gpu:{kind}{described.gpus}")
    return found


def _look(
    spec: ClusterSpec, partition: str | None, probe: GpuProbeRequest
) -> tuple[Wanted, ProbeRecords]:
    root = Path(spec.file_root)
    lock = root / f".realsys-doctor-{secrets.token_hex(8)}.lock"
    wanted = _wanted(spec, partition, probe, lock=str(lock))
    if wanted.processes == 0:
        raise ClusterError(
            f"{_where(spec, partition)} has no GPUs",
            where="--gpu",
            fix="another partition (--partition), gpus in the site file, or --with-gloo to try it on CPUs",
        )
    image = spec.gpu_image or (spec.cpu_image if probe.gloo else None)
    python = f"{spec.venv}/bin/python" if spec.venv else sys.executable
    place = place_of(spec, image, gpu=not probe.gloo, python=python, in_shell=True)
    if spec.scheduler != "slurm":
        return wanted, examine(wanted, place, os.environ)
    make_folders(root, root=root)
    try:
        return _in_job(wanted, place, gpu_request(spec, partition, probe))
    finally:
        lock.unlink(missing_ok=True)


def _in_job(wanted: Wanted, place: ProbeTarget, request: list[str]) -> tuple[Wanted, ProbeRecords]:
    """Runs the measurement in one allocation.

    Raises:
        ClusterError: no nodes became free in time, or Slurm refused; the queue is left without the job.
    """
    done = run_in_job(request, _driver(wanted, place), limit_s=wanted.longest_s + ALLOCATION_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise ClusterError(
            f"{len(wanted.nodes)} nodes were not free within {QUEUE_S} s, or nothing ran on them "
            f"({why_not(done)})",
            where="salloc",
            fix="try again later, with fewer --nodes, or on another --partition",
        )
    result: dict[str, Any] = json.loads(lines[-1])
    steps = tuple(
        StepSeen(**{**step, "nodes": tuple(step["nodes"]), "said": tuple(step["said"])})
        for step in result["steps"]
    )
    seen = ProbeRecords(records=tuple(result["records"]), steps=steps)
    return replace(wanted, nodes=tuple(result["nodes"])), seen


def _driver(wanted: Wanted, place: ProbeTarget) -> str:
    """Builds the shell command that runs drive.py from this installation's code."""
    code = Path(realsys.__file__).parent.parent
    start = f"import sys; sys.path.insert(0, {str(code)!r}); from realsys.slurm.preflight.drive import main"
    arguments = json.dumps({"wanted": asdict(wanted), "place": asdict(place)})
    return shlex.join([sys.executable, "-P", "-c", f"{start}; sys.exit(main())", arguments])


def _wanted(
    spec: ClusterSpec, partition: str | None, probe: GpuProbeRequest, *, lock: str
) -> Wanted:
    """Describes the measurement; node names are ``?`` until Slurm has granted the job."""
    low, _, high = (spec.port_range or "").partition("-")
    is_slurm = spec.scheduler == "slurm"
    described = _described(spec, partition)
    gpus = described.gpus if is_slurm else machine_gpus(os.environ)
    if not is_slurm:
        nodes: tuple[str, ...] = (socket.gethostname().partition(".")[0],)
    elif probe.nodelist and probe.nodes is None:
        nodes = expand(probe.nodelist)
    else:
        nodes = ("?",) * (probe.nodes or min(2, described.nodes or 1))
    return Wanted(
        nodes=nodes,
        device="cpu" if probe.gloo else "cuda",
        processes=CPU_PROCESSES if probe.gloo else gpus,
        gpus=gpus,
        gpu_type=described.gpu_type if is_slurm else None,
        lock=lock if is_slurm else "",
        interface=spec.interface or "",
        ports=(int(low), int(high)) if high else None,
        environment=dict(spec.env_vars),
    )


def _described(spec: ClusterSpec, partition: str | None) -> PartitionSpec:
    return spec.partitions.get(partition or spec.slurm.partition or "", PartitionSpec())


def _where(spec: ClusterSpec, partition: str | None) -> str:
    if spec.scheduler != "slurm":
        return "this machine"
    return f"partition {partition or spec.slurm.partition or '(the default)'} in the site file"
