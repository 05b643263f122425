"""What is asked of Slurm for a trial: the part of a LaunchPlan that a laptop does not have.

Decided by launcher/job/allocation.py; the batch script (launcher/slurm/script.py) and the srun commands
(realsys/slurm/step_command.py) are pure functions of it. Nodes are numbered, not named: which hosts a
job gets is known when it runs. ``nodes`` of a step are runs of equal nodes, so that a plan of a
thousand nodes stays a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from realsys.api.scheduling import WorkerType


class Layout(StrEnum):
    """How a trial's groups become Slurm jobs."""

    SINGLE = "single"  # one allocation of equal nodes
    HET = "het"  # one heterogeneous job, a component for each kind of node
    SPLIT = "split"  # a job a component, started apart


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One srun step: all tasks of one worker type.

    Attributes:
        component: index into ``JobPlan.components``.
        nodes: (number of nodes, tasks on each of them) in order of the component's nodes, from its
            first; nodes after the last run have none. Task i of the group is the i-th in that order.
        cpus_per_task: what Slurm gives it, which is whole cores.
        shares_cpus: it takes no CPUs for itself: how many Slurm would give it is not known.
        gpus_per_task: a fraction below 1 when several tasks share one GPU.
        gpus_per_node: GPUs that the step has on each of its nodes; 0 without GPUs. Meant for
            ``gpu_binding`` visible: task l of a node (SLURM_LOCALID) uses entries
            ``realsys.slurm.gpus.slots`` of them.
        gpu_binding: ``visible``, ``per_task`` (srun's --gpus-per-task) or ``none``.
        time_limit: of this step alone, where it is shorter than the job's.
    """

    worker_type: WorkerType
    component: int = 0
    nodes: tuple[tuple[int, int], ...]
    cpus_per_task: int
    memory_mib: int
    shares_cpus: bool = False
    gpus_per_task: float = 0.0
    gpus_per_node: int = 0
    gpu_type: str | None = None
    gpu_binding: str = "none"
    container_image: str | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    time_limit: str | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes on which the step has a task."""
        return sum(count for count, tasks in self.nodes if tasks)

    @property
    def num_tasks(self) -> int:
        """Tasks of the step."""
        return sum(count * tasks for count, tasks in self.nodes)


@dataclass(frozen=True, kw_only=True)
class JobComponent:
    """Equal nodes asked for together: the whole job, a component of a het job, or one of several jobs.

    Attributes:
        worker_types: whose steps run here, for people.
        cpus_per_node, memory_mib_per_node, gpus_per_node: asked for on every node.
        threads_per_core: of the CPUs, so many are one core; 1 where Slurm counts cores.
        nodelist, exclude: Slurm hostlists, normalised.
        time_limit: as --time, normalised.
        extra: further sbatch options.
    """

    name: str
    worker_types: tuple[WorkerType, ...]
    nodes: int
    cpus_per_node: int
    memory_mib_per_node: int
    gpus_per_node: int = 0
    threads_per_core: int = 1
    gpu_type: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    time_limit: str | None = None
    exclusive: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A trial's Slurm job or jobs.

    Attributes:
        begin, deadline: absolute, ``YYYY-MM-DDTHH:MM:SS`` in the launching host's time zone.
        dependency: as --dependency, with job ids.
        after: the trial or sweep that it waits for, as --after: ``ppo-math/run1:ok``.
        preflight: ``off``, ``warn`` or ``stop``, see SlurmSpec.
        spare: per component, what its nodes have beyond the request of this job: (CPUs, MiB, GPUs)
            of one node; empty where the cluster spec does not describe the partition.
    """

    layout: Layout
    components: tuple[JobComponent, ...]
    begin: str | None = None
    deadline: str | None = None
    requeue: bool = False
    dependency: str | None = None
    after: str | None = None
    preflight: str = "off"
    spare: tuple[tuple[int, int, int], ...] = ()
