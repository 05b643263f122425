"""Builds the srun command of a step, and the host of each of its tasks (pure).

One step per worker type, ``--exact`` beside the others of its allocation. A host file places the tasks
(``--distribution=arbitrary``, man srun): task i runs on line i, so uneven counts per node and several
groups on one node need no arithmetic of Slurm's. Memory is the job's: ``--mem=0`` lets the steps share
the sum that the job requested. Container options go here and never into the batch script, which would
lose srun inside the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ClusterError
from realsys.api.plan import JobLayout, JobPlan, LaunchPlan, PhasePlan, StepPlan
from realsys.slurm.containers import wrap
from realsys.trial.records import AttemptFiles, TrialFiles

TASK_MODULE = "realsys.worker.srun_task"
# What srun would take as its own options: SLURM_NTASKS, SLURM_GPUS_PER_NODE and so on describe the
# batch step, and as inputs of a step they clash with it (man srun, INPUT ENVIRONMENT VARIABLES).
_KEPT = frozenset(
    "SLURM_CONF SLURM_JOB_ID SLURM_JOBID SLURM_CLUSTER_NAME SLURM_CLUSTERS SLURM_WORKING_CLUSTER "
    "SLURM_JOB_NODELIST SLURM_NODELIST SLURM_JOB_NUM_NODES SLURM_RESTART_COUNT SLURM_JOB_START_TIME "
    "SLURM_JOB_END_TIME SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST SLURM_JOB_NAME SLURM_JOB_PARTITION "
    "SLURM_JOB_UID SLURM_JOB_USER SLURM_JOB_ACCOUNT SLURM_JOB_QOS SLURM_TOPOLOGY_ADDR "
    "SLURM_TOPOLOGY_ADDR_PATTERN SLURM_HET_SIZE SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID".split()
)
_KEPT_PREFIXES = ("SLURM_JOB_ID_HET_GROUP", "SLURM_JOB_NODELIST_HET_GROUP", "SLURM_SPANK_")


@dataclass(frozen=True, kw_only=True)
class Again:
    """One task that is restarted, or added later, in a step of its own.

    Attributes:
        index: of its worker.
        restart: number of restarts, including this one; 0: it was added and has no place yet. One that is
            added in the place of another starts with 1: it uses that one's CPUs and GPUs.
        like: for an added worker: index of the planned one with the same configuration.
    """

    index: int
    restart: int
    like: int | None = None

    @property
    def options(self) -> list[str]:
        """Returns the options of the task wrapper."""
        own = [f"--first-index={self.index}", f"--restart={self.restart}"]
        return own if self.like is None else [*own, f"--like={self.like}"]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` without variables that srun would read as options of the step."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))
        or name in _KEPT
        or name.startswith(_KEPT_PREFIXES)
    }


def hosts(step: StepPlan, nodes: Sequence[str]) -> list[str]:
    """Returns the host of each task, in order of their indices.

    Args:
        nodes: the nodes of the step's component, in Slurm's order.
    Raises:
        ClusterError: Slurm assigned fewer nodes than planned.
    """
    needed = sum(count for count, _ in step.nodes)
    if len(nodes) < needed:
        raise ClusterError(
            f"the plan places {step.worker_type} on {needed} nodes, the job has {len(nodes)}",
            where=f"nodes {','.join(nodes[:8]) or '(none)'}",
            fix="a node was lost, or the job was changed by hand: resume the trial",
        )
    found, at = [], 0
    for count, tasks in step.nodes:
        for node in nodes[at : at + count]:
            found += [node] * tasks
        at += count
    return found


def srun_argv(
    plan: LaunchPlan,
    phase: PhasePlan,
    step: StepPlan,
    *,
    plan_hash: str,
    attempt: int,
    python: str,
    again: Again | None = None,
) -> list[str]:
    """Returns the step's whole command line. It names no host: SLURM_HOSTFILE does at run time.

    Args:
        again: for this task alone. The first step still holds its share of the node, so the new one
            requests none: it may use all that the job has there, and restricts itself to the old one's
            CPUs and GPUs (realsys/worker/task_place.py).
    """
    assert plan.job is not None
    cluster, kind = plan.cluster, step.worker_type.value
    logs = TrialFiles(Path(plan.trial_dir)).attempt(attempt).logs
    command = [
        python if step.container_image is None else cluster.container.python,
        "-P",  # no module is imported from the working folder
        "-m",
        TASK_MODULE,
        kind,
        f"--trial-dir={plan.trial_dir}",
        f"--plan-hash={plan_hash}",
        f"--phase={phase.name}",
        f"--attempt={attempt}",
        *(again.options if again else []),
    ]
    wrapped = wrap(
        cluster.container,
        step.container_image,
        command,
        file_root=cluster.file_root,
        gpu=step.gpus_per_task > 0,
    )
    own = again is None and not step.shares_cpus
    share = _share(cluster, step) if own else _no_share(step)
    tasks = "%t" if again is None else str(again.index)
    return [
        "srun",
        *het_group(plan.job, step),
        f"--job-name={kind}",
        f"--nodes={step.num_nodes if again is None else 1}",
        f"--ntasks={step.num_tasks if again is None else 1}",
        "--distribution=arbitrary",
        *share,
        *([f"--time={step.time_limit}"] if step.time_limit else []),
        "--export=ALL",
        "--kill-on-bad-exit=0",  # the supervisor ends the others, once they have said why they fail
        "--wait=0",
        "--unbuffered",
        "--input=none",
        "--open-mode=append",
        f"--output={filename_pattern(str(logs / kind))}-{tasks}.log",
        *(f"--{name}={value}" for name, value in sorted(cluster.slurm.extra_srun.items())),
        *wrapped.srun_options,
        *wrapped.command,
    ]


def srun_log(attempt: AttemptFiles, step: StepPlan, again: Again | None = None) -> Path:
    """Returns the log of the step's srun itself: how tasks ended, and what it could not start.

    A file for each restart: the previous srun may still write about its task 0.
    """
    kind = step.worker_type.value
    name = f"{kind}-{again.index}-{again.restart}" if again else kind
    return attempt.logs / f"srun-{name}.log"


def filename_pattern(path: str) -> str:
    """Escapes a path for --output: a percent sign begins a replacement symbol there (man srun)."""
    return path.replace("%", "%%")


def het_group(job: JobPlan | None, step: StepPlan) -> list[str]:
    """Returns srun's option for the component of a heterogeneous job in which the step runs."""
    if job is None:
        return []
    return [f"--het-group={step.component}"] if job.layout is JobLayout.HET else []


def _share(cluster: ClusterSpec, step: StepPlan) -> list[str]:
    """Returns the step's own share of its nodes, as options."""
    cpu_bind = [f"--cpu-bind={cluster.slurm.cpu_bind}"] if cluster.slurm.cpu_bind else []
    cpus = ["--exact", f"--cpus-per-task={step.cpus_per_task}", "--mem=0"]
    return [*cpus, *_gpu_options(step), *cpu_bind]


def _no_share(step: StepPlan) -> list[str]:
    """Returns options for a step beside all others. Without a GPU request it sees all that the job has on
    the node."""
    gpus = [] if step.gpus_per_task else ["--gres=none"]
    return ["--overlap", "--mem=0", *gpus, "--cpu-bind=none"]


def _gpu_options(step: StepPlan) -> list[str]:
    if step.gpu_binding == "visible":
        kind = f"{step.gpu_type}:" if step.gpu_type else ""
        return [f"--gres=gpu:{kind}{step.gpus_per_node}"]
    if step.gpu_binding == "per_task":
        # No type, which the job has asked for: with one, nodes with two or more of the step's tasks
        # get no GPU at all, without an error (22.05, arbitrary distribution).
        return [f"--gpus-per-task={int(step.gpus_per_task)}"]
    return ["--gres=none"]  # else it would take the job's GPUs and hold up the other steps
