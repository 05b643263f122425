"""What every run of training has: its seed and length, the workers' resources, where it logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiments.parts.worker_resources import cores_and_gpus, host_needs, largest_mib
from realsys.api.experiment import Experiment
from realsys.api.options import LARGEST_SEED, WandbOptions, option
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup, WorkerType
from realsys.api.worker_configs import ExperimentSaveEvalControl
from realsys.models.shape import ModelShape


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
        return cores_and_gpus(kind, self.scheduling.of(kind))

    @property
    def mem_of_toy(self) -> dict[str, int]:
        """The default memory of model workers, by its setting; empty if it is set or follows from GPUs."""
        task, given = self.resources(), self.scheduling.of(WorkerType.MODEL_WORKER).mem
        return {} if task.gpu or given is not None else {"scheduling.model_worker.mem": task.mem}

    def tasks(
        self, counts: Mapping[WorkerType, int], made_before: ModelShape | None = None
    ) -> ExperimentScheduling:
        """Schedules one master and so many workers of each type, with memory for their models.

        Args:
            made_before: sizes of a model that an earlier phase makes.
        """
        groups: dict[str, TasksGroup] = {}
        for kind, count in {**counts, WorkerType.MASTER_WORKER: 1}.items():
            task = self.resources(kind)
            if task.gpu and self.scheduling.of(kind).mem is None:
                needs = host_needs(kind, self.initial_setup(), made_before)
                task = replace(task, mem=max(task.mem, largest_mib(needs)))
            groups[kind.value] = TasksGroup(count=count, scheduling=task)
        return ExperimentScheduling(**groups)  # type: ignore[arg-type]
