"""The environment of a worker process: common variables, the site's variables, secrets.

Secrets and the variables copied from the launching shell come from files of mode 0600 in the trial's
folder, with one ``export NAME='value'`` per line, which a shell can source too. They never appear on a
command line, in a script or in a log.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from realsys.api.errors import TrialError
from realsys.api.plan import LaunchPlan, PhasePlan
from realsys.api.scheduling import WorkerType
from realsys.trial.records import TrialFiles

_DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # Compute threads sleep soon after they run out of work. By default OpenMP's threads keep spinning,
    # and as soon as anything else runs they take cores from the threads they wait for.
    "GOMP_SPINCOUNT": "2000",
}
# Worker types whose tensors may be in host memory; for the others the settings only cost memory.
COMPUTING = (WorkerType.MODEL_WORKER, WorkerType.GENERATION_SERVER, WorkerType.EVALUATOR)
_MEMORY = {
    # glibc keeps freed memory for the tensors of the next step (mallopt(3)); otherwise each step gets
    # fresh pages, and their first touch costs a CPU trainer a tenth of its time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    # Pages of 2 MiB if the kernel grants them on request (glibc 2.35 and later; "Memory Allocation
    # Tunables" in its manual): CPU trainers and generators use more memory than the kernel can provide in
    # 4 KiB pages without delay.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

# On Intel's processors each row of a matrix product is then summed in one order, whatever the number of
# rows and threads (oneMKL developer guide, "Strict CNR Mode"), as generation relies on (decoder.py). Its
# code for other processors does so by itself.
_STRICT_SUMS = {"MKL_CBWR": "AUTO,STRICT"}
# torch resizes its segments of GPU memory, because tensor sizes differ in every batch.
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Workspaces with which cuBLAS is bitwise reproducible (cuBLAS manual, Results Reproducibility).
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")


def gpu_variables(phase: PhasePlan, worker_type: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set before a worker starts CUDA (pure); none for a worker without a GPU,
    or with an engine that has settings of its own.

    Args:
        environ: the worker's other variables; the user's values in it are kept.
    """
    group = phase.scheduling.groups().get(WorkerType(worker_type))
    if group is None or not group.scheduling.gpu or worker_type not in COMPUTING:
        return {}
    if worker_type == WorkerType.GENERATION_SERVER and any(
        server.backend_type != "embedded" for server in phase.config.generation_server
    ):
        return {}
    found = {} if any(name in environ for name in _ALLOCATOR_NAMES) else dict(_ALLOCATOR)
    if phase.config.deterministic and environ.get(_WORKSPACE) not in _REPEATABLE:
        found[_WORKSPACE] = _REPEATABLE[0]
    return found


def strict_sums() -> dict[str, str]:
    """Returns variables with which a CPU's sums do not depend on what else is computed, to be set before
    torch is imported; none on a processor that needs none.
    """
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return dict(_STRICT_SUMS) if "GenuineIntel" in first else {}


def worker_environment(
    plan: LaunchPlan, environ: Mapping[str, str], worker_type: str
) -> dict[str, str]:
    """Returns the variables to set on top of ``environ`` for a worker; the user's own override defaults."""
    computes = {**_MEMORY, **strict_sums()} if worker_type in COMPUTING else {}
    defaults = {**_DEFAULTS, **computes}
    return {
        **{name: environ.get(name, value) for name, value in defaults.items()},
        **plan.cluster.env_vars,
        "REALSYS_TRIAL_DIR": plan.trial_dir,
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def export_lines(variables: Mapping[str, str]) -> str:
    """Returns lines that a shell can source, with quoted values."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def read_exports(path: Path) -> dict[str, str]:
    """Reads a file written with ``export_lines``; returns no variables if there is none.

    Raises:
        TrialError: it can't be read.
    """
    try:
        words = shlex.split(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TrialError(
            f"the trial's environment can't be read: {error}",
            where=str(path),
            fix="launch the trial again",
        ) from error
    pairs = (word.partition("=") for word in words if word != "export")
    return {name: value for name, _, value in pairs}


def write_exports(path: Path, variables: Mapping[str, str]) -> None:
    """Writes the file, readable only by its owner from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(export_lines(variables))


def task_environment(
    plan: LaunchPlan, environ: Mapping[str, str], worker_type: str
) -> dict[str, str]:
    """Returns the whole environment of a worker started by a Slurm task."""
    files = TrialFiles(Path(plan.trial_dir))
    copied = read_exports(files.task_environment)
    merged = {**environ, **copied}
    return {**merged, **worker_environment(plan, merged, worker_type)}
