"""Selects the variables that a job takes over from the launching shell (pure).

Not the whole environment: a login shell's brings stale CUDA variables, another virtual environment and
secrets into the job. There are two lists: what a program on a host needs to be found and to use the
user's locale, and what also applies inside a container.
"""

from __future__ import annotations

from collections.abc import Mapping

from realsys.runtime.child_processes.python_path import named_folders

HOST = frozenset(
    "PATH LD_LIBRARY_PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM MODULEPATH MODULESHOME "
    "LMOD_CMD VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH SLURM_CONF".split()
)
HOST_PREFIXES = ("LC_",)
TASK = frozenset(
    "OMP_NUM_THREADS MKL_NUM_THREADS GOMP_SPINCOUNT TOKENIZERS_PARALLELISM http_proxy https_proxy "
    "no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE "
    "WANDB_MODE WANDB_BASE_URL WANDB_DIR GLIBC_TUNABLES".split()
)
TASK_PREFIXES = tuple("HF_ MALLOC_ NCCL_ GLOO_ UCX_ TORCH_ TRITON_ SGLANG_ VLLM_".split())
# Secrets: only if the site file lists them.
NEVER = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


def host_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Selects the variables for the batch script and, through it, for tasks outside containers."""
    return named_folders(_chosen(environ, HOST, HOST_PREFIXES))


def task_variables(environ: Mapping[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """Selects the variables for every task, including the secrets that the site file lists."""
    found = _chosen(environ, TASK, TASK_PREFIXES)
    return {**found, **{name: environ[name] for name in secrets if name in environ}}


def dropped_variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """Lists warnings about variables of this shell that could change a submission and are not passed on.

    sbatch prefers SBATCH_… to the script; inside a job, SLURM_… describe that job.
    """
    warnings = []
    if job_id := environ.get("SLURM_JOB_ID"):
        warnings.append(
            f"this shell is inside Slurm job {job_id}: its SLURM_… variables are not passed on to the "
            "new job"
        )
    options = sorted(name for name in environ if name.startswith(("SBATCH_", "SRUN_", "SALLOC_")))
    if options:
        warnings.append(
            f"not passed on: {', '.join(options)}; use options such as --partition instead"
        )
    return warnings


def _chosen(
    environ: Mapping[str, str], names: frozenset[str], prefixes: tuple[str, ...]
) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in names or name.startswith(prefixes)) and name not in NEVER
    }
