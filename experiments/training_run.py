"""What every run of training has: its seed and length, the workers' resources, where it logs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from experiments.parts.chosen_settings import OF_RECIPES
from realsys.api.experiment import ChosenSetting, Experiment, ExperimentConfig
from realsys.api.options import LARGEST_SEED, WandbOptions, option
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup, WorkerType
from realsys.api.worker_configs import ExperimentSaveEvalControl
from realsys.config.option_tree import value_at
from realsys.models.shape import ModelShape
from realsys.planner.memory.copy_memory import Terms
from realsys.planner.memory.host_memory import (
    host_memory_of_experiment,
    host_mib,
    memory_on_cpus,
)
from realsys.planner.memory.server_memory import memory_of_evaluator, memory_of_server

# Cores, host memory in MiB: far more than the built-in model needs.
DEFAULTS = {
    WorkerType.MODEL_WORKER: Scheduling(cpu=2, mem=8192),
    WorkerType.MASTER_WORKER: Scheduling(cpu=1, mem=2048),
    WorkerType.GENERATION_SERVER: Scheduling(cpu=1, mem=4096),
    WorkerType.GSERVER_MANAGER: Scheduling(cpu=1, mem=1024),
    WorkerType.ROLLOUT_WORKER: Scheduling(cpu=1, mem=2048),
    WorkerType.EVALUATOR: Scheduling(cpu=1, mem=4096),
    WorkerType.REWARD_WORKER: Scheduling(cpu=1, mem=2048),
}
# Threads for compute, backward pass, NCCL, tensor server and control. Six per GPU on 8 GPUs leave room on a
# node of 64 cores for the master and servers; eight would not.
CPUS_WITH_GPU = 6


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Experiment):
    """Base of the experiments."""

    seed: int = option(1, "of data order, sampling and everything drawn", ge=0, le=LARGEST_SEED)
    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(), "how long to train, when to save and evaluate"
    )
    train_bs_n_seqs: int = option(64, "questions a step", ge=1)
    deterministic: bool | None = option(
        None,
        "equal runs give equal bits, on GPUs too, where they are slower then; none: on CPUs only",
    )
    tensorboard: bool = option(True, "write TensorBoard files")
    wandb: WandbOptions = option(WandbOptions(), "Weights & Biases")

    def resources(self, kind: WorkerType = WorkerType.MODEL_WORKER) -> Scheduling:
        """Cores, which are also compute threads, and GPUs of a worker; for its memory, see ``tasks``."""
        wanted, default = self.scheduling.of(kind), DEFAULTS[kind]
        if kind is WorkerType.MODEL_WORKER and wanted.gpu:
            default = replace(default, cpu=CPUS_WITH_GPU)
        return wanted.on(default)

    def not_given(
        self, proposed: Iterable[ChosenSetting], given: Collection[str]
    ) -> tuple[ChosenSetting, ...]:
        """Those of ``proposed`` that neither the user nor a recipe sets, and that change something."""
        return tuple(
            one
            for one in proposed
            if self.is_open(one.path, given) and value_at(self, one.path) != one.value
        )

    def is_open(self, path: str, given: Collection[str]) -> bool:
        """True if the user does not set it, and its value is the declared default or that of recipes."""
        if any(path == one or path.startswith(f"{one}.") for one in given):
            return False
        group, _, name = path.rpartition(".")
        owner = value_at(self, group) if group else self
        declared = {f.name: f.default for f in fields(owner)}
        if name not in declared:
            return False
        return getattr(owner, name) in (declared[name], *OF_RECIPES.get(path, ()))

    def tasks(
        self, counts: Mapping[WorkerType, int], made_before: ModelShape | None = None
    ) -> ExperimentScheduling:
        """Schedules one master and so many workers of each type, with memory for their models.

        Args:
            made_before: sizes of a model that an earlier phase makes.
        """
        groups: dict[str, TasksGroup] = {}
        config: ExperimentConfig | None = None
        for kind, count in {**counts, WorkerType.MASTER_WORKER: 1}.items():
            task = self.resources(kind)
            computes = task.gpu or kind is WorkerType.MODEL_WORKER
            if computes and self.scheduling.of(kind).mem is None:
                config = config or self.initial_setup()
                needs = host_needs(kind, config, made_before, gpu=bool(task.gpu))
                task = replace(task, mem=max([task.mem, *map(host_mib, needs)]))
            groups[kind.value] = TasksGroup(count=count, scheduling=task)
        return ExperimentScheduling(**groups)  # type: ignore[arg-type]


def host_needs(
    kind: WorkerType, config: ExperimentConfig, made_before: ModelShape | None, *, gpu: bool
) -> Iterable[Terms]:
    """Yields what workers need of their hosts' memory, as far as their models are known.

    Args:
        made_before: sizes of a model that an earlier phase makes.
    """
    if kind is WorkerType.MODEL_WORKER:
        of_workers = host_memory_of_experiment if gpu else memory_on_cpus
        yield from of_workers(config, made_before).values()
    elif kind in (WorkerType.GENERATION_SERVER, WorkerType.EVALUATOR):
        of = memory_of_evaluator if kind is WorkerType.EVALUATOR else memory_of_server
        if (found := of(config, made_before=made_before)) is not None:
            yield found.host
