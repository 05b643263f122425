"""``sft-math``: supervised fine-tuning on questions with step-by-step answers.

Starts from a Hugging Face directory (``model.path=``) or, without one, from a small Llama with random
weights. ``ppo-math`` runs it once to make its starting policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from experiments.parts.backend_args import backend_of, compute_dtype, mb_spec_of
from experiments.parts.layout_checks import held_out_problems, layout_problems_of
from experiments.parts.math_files import (
    absolute,
    dataset_args,
    dataset_problems,
    model_problems,
    sampled_remarks,
    toy_remarks,
)
from experiments.parts.placement import RolePlacement, place_models
from experiments.parts.worker_resources import cpus_of_worker, mem_of_worker
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.experiment import Experiment, ExperimentConfig
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.api.options import (
    LARGEST_SEED,
    MathDatasetOptions,
    ModelOptions,
    OptimizerOptions,
    WandbOptions,
    option,
)
from realsys.api.plain import to_plain
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.api.worker_configs import ExperimentSaveEvalControl
from realsys.models.shape import ModelShape
from realsys.planner.allocation import CallAllocation


@dataclass(frozen=True, kw_only=True)
class TinyLlamaOptions:
    """Shape of the model made from scratch when there is no ``path``."""

    hidden_size: int = option(128, "width", ge=8)
    num_layers: int = option(3, "layers", ge=1)
    num_heads: int = option(4, "attention heads", ge=1)
    num_kv_heads: int = option(2, "key-value heads", ge=1)
    vocab_size: int = option(512, "tokens of the byte-level BPE tokenizer", ge=300)

    def shape(self) -> ModelShape:
        """Returns the sizes of that model, as realsys/models/tiny_llama.py makes it."""
        return ModelShape(
            family="llama",
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            vocab_size=self.vocab_size,
            max_positions=256,
        )


@dataclass(frozen=True, kw_only=True)
class SFTMathExperiment(Experiment):
    """Supervised fine-tuning on math questions."""

    seed: int = option(
        1, "of initialisation, data order and everything drawn", ge=0, le=LARGEST_SEED
    )
    exp_ctrl: ExperimentSaveEvalControl = option(
        ExperimentSaveEvalControl(), "how long to train, when to save and evaluate"
    )
    model: ModelOptions = option(
        ModelOptions(
            optimizer=OptimizerOptions(lr=2e-3, weight_decay=0.0, warmup_steps_proportion=0.05)
        ),
        "the model",
    )
    init: TinyLlamaOptions = option(TinyLlamaOptions(), "the model made when model.path is none")
    # Most training answers omit the carry. The resulting policy solves only the other half of the held-out
    # questions, but also has the correct behaviour with some probability, which the reward can reinforce.
    dataset: MathDatasetOptions = option(
        MathDatasetOptions(train_size=600 * 48, train_bs_n_seqs=48, eval_size=0, slip_share=0.65),
        "questions and answers",
    )
    max_answer_len: int = option(128, "longest answer", unit="tokens", ge=1)
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

    @property
    def _topo(self) -> ProcessTopology:
        return ProcessTopology.parse(self.model.parallel or "d1t1p1", where="model.parallel")

    @property
    def _places(self) -> dict[ModelName, CallAllocation]:
        workers = tuple(range(self._topo.world_size))
        return {ModelName("model"): CallAllocation(workers=workers, topology=self._topo)}

    def problems(self) -> Iterator[ConfigError]:
        """Yields unreadable files, unknown names, and batches that do not divide."""
        yield from model_problems(self.model, "model")
        yield from dataset_problems(self.dataset, tokenizer_dir=self.model.path)
        if self.dataset.train_bs_n_seqs % self._topo.data:
            yield ConfigError(
                f"a batch of {self.dataset.train_bs_n_seqs} does not divide over "
                f"{self._topo.data} data-parallel ranks",
                where="dataset.train_bs_n_seqs and model.parallel",
                fix=f"use a multiple of {self._topo.data}",
            )
        yield from held_out_problems(
            self.dataset.eval_size, self._topo.data, where="model.parallel"
        )
        if self.model.pool is not None:
            yield ConfigError(
                "this experiment has one model and no pools", where="model.pool", fix="leave it out"
            )
        if self.model.offload:
            yield ConfigError(
                "this experiment has one model, so no other would use the memory",
                where="model.offload",
                fix="leave it out; cpu_offload keeps the optimizer in CPU memory",
            )
        yield from layout_problems_of(
            self._places,
            {"model": self.model},
            default_path=None,
            built_in=self.init.shape(),
        )

    def remarks(self, given: Collection[str]) -> Iterator[str]:
        """Warns of toy defaults on a real model, and reports how many questions were counted."""
        values = {
            "model.optimizer.lr": self.model.optimizer.lr,
        }
        if not self.gpus_per_model_worker:  # else it follows from the model
            values["mem_per_model_worker"] = self._mem
        yield from toy_remarks(self.model.path, values, given)
        yield from sampled_remarks(self.dataset, self.model.path)

    def input_files(self) -> tuple[str, ...]:
        """Lists the question files, and the files of the starting model."""
        folder = absolute(self.model.path)
        weights = [] if folder is None else sorted(Path(folder).glob("*.safetensors"))
        given = (self.dataset.path, self.dataset.eval_path, *map(str, weights))
        return tuple(path for path in map(absolute, given) if path is not None)

    def with_gpus(self, per_model_worker: float) -> Self:
        """Sets ``gpus_per_model_worker``, on which dtype and host memory depend."""
        return replace(self, gpus_per_model_worker=per_model_worker)

    def scheduling_setup(self) -> ExperimentScheduling:
        """Schedules one master, and as many model workers as the model's layout has processes."""
        return math_scheduling(
            self._topo.world_size,
            cpu=self._cpus,
            gpu=self.gpus_per_model_worker,
            mem=self._mem,
        )

    @property
    def _cpus(self) -> int:
        return cpus_of_worker(self.cpus_per_model_worker, gpu=self.gpus_per_model_worker)

    @property
    def _mem(self) -> int:
        return mem_of_worker(
            self.mem_per_model_worker, gpu=self.gpus_per_model_worker, config=self.initial_setup
        )

    def initial_setup(self) -> ExperimentConfig:
        """Builds the configuration: one model, one call."""
        data = {**dataset_args(self.dataset), "max_answer_len": self.max_answer_len}
        dtype = compute_dtype(self.model, gpus=self.gpus_per_model_worker)
        if self.model.path is None:
            model = ModelAbstraction(
                "tiny_llama", {"dtype": dtype, "seed": self.seed, **to_plain(self.init)}
            )
        else:
            model = ModelAbstraction(
                "hf_causal_lm", {"path": absolute(self.model.path), "dtype": dtype}
            )
        role = RolePlacement(
            model=model,
            backend=backend_of(self.model, trained=True),
            eval_dataset=DatasetAbstraction("math_sft", {**data, "split": "test"})
            if self.dataset.eval_size
            else None,
        )
        train = MFCDef(
            name="sft_train",
            n_seqs=self.dataset.train_bs_n_seqs,
            interface_type=ModelInterfaceType.TRAIN_STEP,
            interface_impl=ModelInterfaceAbstraction("sft"),
            model_name=ModelName("model"),
            input_keys=("packed_input_ids", "prompt_mask"),
            mb_spec=mb_spec_of(self.model),
        )
        return ExperimentConfig(
            exp_ctrl=self.exp_ctrl,
            model_rpcs=(train,),
            dataset_keys=("packed_input_ids", "prompt_mask"),
            deterministic=self.deterministic,
            model_worker=place_models(
                self._places,
                {"model": role},
                n_workers=self._topo.world_size,
                base_seed=self.seed,
                datasets=(DatasetAbstraction("math_sft", {**data, "split": "train"}),),
                tokenizer_name_or_path=absolute(self.model.path),
                shuffle_dataset=self.dataset.shuffle,
                num_threads=self._cpus,
            ),
            wandb=self.wandb,
            tensorboard=self.tensorboard,
        )


def math_scheduling(num_workers: int, *, cpu: int, gpu: float, mem: int) -> ExperimentScheduling:
    """Schedules one small master and ``num_workers`` model workers."""
    return ExperimentScheduling(
        model_worker=TasksGroup(
            count=num_workers,
            scheduling=Scheduling.model_worker_default(cpu=cpu, gpu=gpu, mem=mem),
        ),
        master_worker=TasksGroup(
            count=1, scheduling=Scheduling.master_worker_default(cpu=1, mem=2048)
        ),
    )
