"""The environment of a worker process: what every worker needs, the site's variables, the secrets.

Secrets and the variables taken over from the launching shell come from files of mode 0600 in the
trial's folder, one ``export NAME='value'`` a line, which a shell can source too. They never stand on a
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
    # Compute threads fall asleep soon after they run out of work. At OpenMP's default they spin on,
    # and as soon as anything else runs they take the cores from their own partners.
    "GOMP_SPINCOUNT": "2000",
}
# Of those whose tensors may be in the machine's own memory; the others would only grow by it.
COMPUTING = (WorkerType.MODEL_WORKER, WorkerType.GENERATION_SERVER, WorkerType.EVALUATOR)
_MEMORY = {
    # glibc keeps what tensors of a step gave back for those of the next one (mallopt(3)); else each
    # step gets fresh pages, whose first touch a CPU trainer pays with a tenth of its time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    # Pages of 2 MiB where the kernel gives them to those who ask (from glibc 2.35 on; "Memory Allocation
    # Tunables" in its manual): a CPU trainer's and generator's memory is more than it finds 4 KiB pages
    # of without waiting.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


# Of a GPU's memory, torch grows and shrinks its segments: ours are of other sizes in every batch.
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Workspaces with which cuBLAS gives equal bits for equal numbers (cuBLAS manual, Results Reproducibility).
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")


def gpu_variables(phase: PhasePlan, worker_type: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What must be set before a worker starts CUDA (pure); nothing for one without a GPU, or whose program
    has its own habits.

    Args:
        environ: the worker's, but for these; what the user set there stays.
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


def worker_environment(
    plan: LaunchPlan, environ: Mapping[str, str], worker_type: str
) -> dict[str, str]:
    """Variables to put over ``environ`` for a worker of the trial; the user's own win over defaults."""
    defaults = {**_DEFAULTS, **(_MEMORY if worker_type in COMPUTING else {})}
    return {
        **{name: environ.get(name, value) for name, value in defaults.items()},
        **plan.cluster.env_vars,
        "REALSYS_TRIAL_DIR": plan.trial_dir,
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def export_lines(variables: Mapping[str, str]) -> str:
    """Lines that a shell can source, values quoted."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def read_exports(path: Path) -> dict[str, str]:
    """The variables of a file that ``export_lines`` wrote; empty when there is none.

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
    """Writes the file, readable by its owner alone from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(export_lines(variables))


def task_environment(
    plan: LaunchPlan, environ: Mapping[str, str], worker_type: str
) -> dict[str, str]:
    """The whole environment of a worker that a Slurm task starts."""
    files = TrialFiles(Path(plan.trial_dir))
    taken_over = read_exports(files.task_environment)
    merged = {**environ, **taken_over}
    return {**merged, **worker_environment(plan, merged, worker_type)}
