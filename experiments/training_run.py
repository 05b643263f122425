"""What every run of training has: its seed and length, the model workers' resources, where it logs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from experiments.parts.worker_resources import cpus_of_worker, mem_of_worker
from realsys.api.experiment import Experiment
from realsys.api.options import LARGEST_SEED, WandbOptions, option
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
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
    cpus_per_model_worker: int | None = option(
        None, "cores and compute threads of a model worker; none: 2, with GPUs 6", ge=1
    )
    gpus_per_model_worker: float = option(0.0, "GPUs of a model worker", ge=0)
    mem_per_model_worker: int | None = option(
        None,
        "memory of a model worker; none: 8192, with GPUs what its models need beside them",
        unit="MiB",
        ge=1,
    )
    deterministic: bool | None = option(
        None,
        "equal runs give equal bits, on GPUs too, where they are slower then; none: on CPUs only",
    )
    tensorboard: bool = option(True, "write TensorBoard files")
    wandb: WandbOptions = option(WandbOptions(), "Weights & Biases")

    def with_gpus(self, per_model_worker: float) -> Self:
        """Sets ``gpus_per_model_worker``, on which dtype and host memory depend."""
        return replace(self, gpus_per_model_worker=per_model_worker)

    @property
    def cpus(self) -> int:
        """Cores and compute threads of a model worker."""
        return cpus_of_worker(self.cpus_per_model_worker, gpu=self.gpus_per_model_worker)

    def mem(self, made_before: ModelShape | None = None) -> int:
        """MiB of a model worker.

        Args:
            made_before: sizes of a model that an earlier phase makes.
        """
        return mem_of_worker(
            self.mem_per_model_worker,
            gpu=self.gpus_per_model_worker,
            config=self.initial_setup,
            made_before=made_before,
        )

    def training_tasks(self, n_workers: int, *, mem: int) -> ExperimentScheduling:
        """Schedules one small master and ``n_workers`` model workers."""
        return ExperimentScheduling(
            model_worker=TasksGroup(
                count=n_workers,
                scheduling=Scheduling.model_worker_default(
                    cpu=self.cpus, gpu=self.gpus_per_model_worker, mem=mem
                ),
            ),
            master_worker=TasksGroup(
                count=1, scheduling=Scheduling.master_worker_default(cpu=1, mem=2048)
            ),
        )
