"""Runs the small job with which `realsys doctor` examines a compute node.

Makes one allocation with one srun for the host and one for each image, so that images run exactly as a
trial's tasks do. Every part has a deadline; a job that is not done by then is cancelled.
"""

from __future__ import annotations

import fcntl
import json
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.job.groups import SITE_DEFAULTS
from launcher.slurm.doctor import node_probe
from launcher.slurm.doctor.store_checks import node_store_probe
from launcher.slurm.slurm_commands import last_error_line, run_slurm
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError
from realsys.slurm.containers import wrap
from realsys.slurm.preflight.drive import in_site_shell
from realsys.trial.folders import make_folders

QUEUE_S = 60  # longest wait for a node
HOST_S, IMAGE_S = 60, 420  # longest run; the first use of an image may have to fetch it
PACKAGES = (
    "realsys", "torch", "transformers", "safetensors", "accelerate", "numpy", "pyzmq", "msgspec",
    "submitit", "math-verify", "tensorboard",
)  # fmt: skip
_BEGIN, _END = "@@ realsys begin", "@@ realsys end"
_EPHEMERAL = (49152, 65535)  # if no range is configured: tests whether any port can be bound


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The result of one srun.

    Attributes:
        begun, ended: seconds since 1970 on the login node's clock, around the srun.
        report: see node_probe.look; None if the probe did not run.
        output: last lines of its other output: errors of srun, of the runtime, of Python.
    """

    begun: float
    ended: float
    returncode: int
    report: Mapping[str, Any] | None
    output: str


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """What the compute node is to be examined for.

    Attributes:
        images: option of the spec → image, each distinct image once.
        token: the content of the login node's probe file.
    """

    spec: ClusterSpec
    request: tuple[str, ...]
    images: Mapping[str, str]
    gpu: bool
    token: str

    @property
    def probe_file(self) -> str:
        """Stem of the names of the two probe files under the file root."""
        return f".realsys-doctor-{self.token}"


def site_request(spec: ClusterSpec, partition: str | None) -> list[str]:
    """Builds the options of sbatch and salloc common to all of the site's jobs."""
    given = {name: getattr(spec.slurm, name) for name in SITE_DEFAULTS}
    given["partition"] = partition or given["partition"]
    return [f"--{option}={value}" for option, value in given.items() if value]


def small_request(spec: ClusterSpec, partition: str | None) -> list[str]:
    """Builds the options of a job of one task, with one GPU if the partition has any."""
    described = spec.partitions.get(partition or spec.slurm.partition or "")
    found = site_request(spec, partition)
    found += ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=1024M"]
    if described and described.gpus:
        kind = f"{described.gpu_type}:" if described.gpu_type else ""
        found.append(f"--gres=gpu:{kind}1")
    return found


def node_job(spec: ClusterSpec, partition: str | None) -> NodeJob:
    """Describes the job for a site. Raises ConfigError if a mount can't be expressed."""
    images: dict[str, str] = {}
    for option in ("gpu_image", "cpu_image", "gpu_infer_image"):
        image = getattr(spec, option)
        if spec.container.runtime != "none" and image and image not in images.values():
            images[option] = image
    request = small_request(spec, partition)
    minutes = 2 + len(images) * (IMAGE_S // 60 + 1)
    return NodeJob(
        spec=spec,
        request=(*request, f"--time={minutes}"),
        images=images,
        gpu=any(option.startswith("--gres=gpu") for option in request),
        token=secrets.token_hex(8),
    )


def run_node_job(job: NodeJob) -> dict[str, NodeReport]:
    """Runs the job and returns each step's report: ``host``, and the images by the name of their option.

    Raises:
        ClusterError: no node became free in time, or Slurm refused; the queue is left without the job.
        OSError: the file root can't be written.
    """
    root = Path(job.spec.file_root)
    make_folders(root, root=root)
    login = root / f"{job.probe_file}.login"
    login.write_text(job.token, encoding="utf-8")
    refused = ""
    try:
        with login.open("r+") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX)  # the node tests whether it sees this lock
            except OSError as error:
                refused = f"on this host: {error}"
            limit_s = HOST_S + len(job.images) * IMAGE_S + 30
            done = run_in_job(job.request, script(job), limit_s=limit_s)
    finally:
        login.unlink(missing_ok=True)
    seen = parse(done.stdout)
    if refused and (host := seen.get("host")) and host.report is not None:
        host.report["shared"]["locks"] = refused
    if not seen:
        raise ClusterError(
            why_not(done),
            where="salloc",
            fix="see what `sinfo` and `realsys doctor`'s other lines say",
        )
    return seen


def run_in_job(
    request: Sequence[str], command: str, *, limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a shell command inside an allocation, on this host.

    Args:
        limit_s: of the command, after the wait for nodes.
    Raises:
        ClusterError: it took too long, or Slurm does not answer; the queue is left without the job.
    """
    name = f"realsys-doctor-{secrets.token_hex(8)}"
    argv = ["salloc", "--quiet", *request, f"--job-name={name}", f"--immediate={QUEUE_S}"]
    try:
        return run_slurm([*argv, "sh", "-c", command], timeout_s=QUEUE_S + limit_s)
    except BaseException:
        run_slurm(["scancel", "--quiet", f"--name={name}"], timeout_s=20)
        raise


def why_not(done: subprocess.CompletedProcess[str]) -> str:
    """Returns why an allocation gave no result."""
    return last_error_line(done.stderr) or f"salloc ended with {done.returncode}"


def script(job: NodeJob) -> str:
    """Builds the script that runs on the login node inside the allocation: the sruns in sequence (pure)."""
    # `python -c` imports from the working folder first, and a Python that is too old has no -P.
    lines = ["cd /"]
    for step, argv, limit_s in _steps(job):
        command = shlex.join(["timeout", "-k", "5", str(limit_s), *argv])
        lines += [
            f'echo "{_BEGIN} {step} $(date +%s.%N)"',
            f"{command} 2>&1",
            f'echo "{_END} {step} $? $(date +%s.%N)"',
        ]
    return "\n".join(lines)


def parse(output: str) -> dict[str, NodeReport]:
    """Parses the steps from the script's output; a step that was cut off is left out (pure)."""
    pattern = rf"^{_BEGIN} (\S+) ([\d.]+)\n(.*?)^{_END} \1 (\d+) ([\d.]+)$"
    found = {}
    for match in re.finditer(pattern, output, re.M | re.S):
        step, begun, text, code, ended = match.groups()
        lines = text.splitlines()
        reports = [line for line in lines if line.startswith(node_probe.MARK)]
        rest = [line for line in lines if not line.startswith(node_probe.MARK) and line.strip()]
        found[step] = NodeReport(
            begun=float(begun),
            ended=float(ended),
            returncode=int(code),
            report=json.loads(reports[0].removeprefix(node_probe.MARK)) if reports else None,
            output="\n".join(rest[-5:]),
        )
    return found


def _steps(job: NodeJob) -> Iterator[tuple[str, list[str], int]]:
    """Yields (name, argv, time limit in seconds) of each srun."""
    spec = job.spec
    program = ["-c", Path(node_probe.__file__).read_text(encoding="utf-8"), _wanted(job)]
    srun = ["srun", "--ntasks=1", "--nodes=1", "--export=ALL", "--input=none"]
    python = f"{spec.venv}/bin/python" if spec.venv else sys.executable
    yield "host", [*srun, *in_site_shell(spec, [python, *program])], HOST_S
    for option, image in job.images.items():
        wrapped = wrap(
            spec.container,
            image,
            [spec.container.python, *program],
            file_root=spec.file_root,
            gpu=job.gpu and option != "cpu_image",
        )
        yield option, [*srun, *wrapped.srun_options, *wrapped.command], IMAGE_S


def _wanted(job: NodeJob) -> str:
    low, _, high = (job.spec.port_range or "").partition("-")
    return json.dumps(
        {
            "file_root": job.spec.file_root,
            "probe_file": job.probe_file,
            "store": node_store_probe(job.spec),
            "ports": [int(low), int(high)] if high else list(_EPHEMERAL),
            "packages": PACKAGES,
        }
    )
