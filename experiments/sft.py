"""Supervised fine-tuning on the worked answers of a task. ``sft-math``.

Starts from a Hugging Face directory (``model.path=``) or, without one, from a small Llama with random
weights. Reinforcement learning without a given policy runs it once to make its starting policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from experiments.parts.backend_args import backend_of, compute_dtype, mb_spec_of
from experiments.parts.call_placement import RolePlacement, place_models
from experiments.parts.chosen_settings import SMALL_SFT_LR, chosen_for_sft
from experiments.parts.held_out_records import held_out_problems_of
from experiments.parts.layout_checks import held_out_problems, layout_problems_of
from experiments.parts.model_files import model_problems, starting_model, turn_end_warnings
from experiments.parts.question_files import absolute
from experiments.task import MathTask, Task
from experiments.training_run import TrainingRun
from realsys.api.dataflow import MFCDef, OffloadHook
from realsys.api.errors import ConfigError
from realsys.api.experiment import ChosenSetting, ExperimentConfig
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.api.options import ModelOptions, OptimizerOptions, option
from realsys.api.plain import to_plain
from realsys.api.scheduling import ExperimentScheduling, WorkerType
from realsys.models.model_arguments import TinyLlamaOptions
from realsys.planner.allocation import CallAllocation


@dataclass(frozen=True, kw_only=True)
class SFTExperiment(TrainingRun):
    """Supervised fine-tuning."""

    model: ModelOptions = option(
        ModelOptions(
            optimizer=OptimizerOptions(
                lr=SMALL_SFT_LR, weight_decay=0.0, warmup_steps_proportion=0.05
            )
        ),
        "the model",
    )
    init: TinyLlamaOptions = option(TinyLlamaOptions(), "the model made when model.path is none")
    # Most training answers omit the carry. The resulting policy solves only the other half of the held-out
    # questions, but also has the correct behaviour with some probability, which the reward can reinforce.
    task: Task = option(
        MathTask(train_size=600 * 48, eval_size=0, slip_share=0.65), "questions and answers"
    )
    train_bs_n_seqs: int = option(48, "questions a step", ge=1)
    max_answer_len: int = option(128, "longest answer", unit="tokens", ge=1)

    call: ClassVar[str] = "sft_train"
    keys: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")

    @property
    def held(self) -> dict[str, ModelOptions]:
        """The models of a run by role, in the order in which a worker lists them."""
        return {"model": self.model}

    @property
    def _topo(self) -> ProcessTopology:
        return self._topo_of("model")

    def _topo_of(self, role: str) -> ProcessTopology:
        given = self.held[role].parallel or self.model.parallel or "d1t1p1"
        return ProcessTopology.parse(given, where=f"{role}.parallel")

    @property
    def _places(self) -> dict[ModelName, CallAllocation]:
        """Each model on the first workers, as many as its layout has processes."""
        topologies = {role: self._topo_of(role) for role in self.held}
        return {
            ModelName(role): CallAllocation(workers=tuple(range(topo.world_size)), topology=topo)
            for role, topo in topologies.items()
        }

    @property
    def _n_workers(self) -> int:
        return max(len(place.workers) for place in self._places.values())

    def problems(self) -> Iterator[ConfigError]:
        """Yields unreadable files, unknown names, and batches that do not divide."""
        yield from model_problems(self.model, "model")
        yield from self.task.problems(
            batch_size=self.train_bs_n_seqs, tokenizer_dir=self.model.path
        )
        yield from self.task.answer_problems()
        yield from self.task.conversation_problems(
            self.model.path, max_answer_len=self.max_answer_len
        )
        read = list(self.task.read_questions("task"))
        yield from held_out_problems_of(read, read)
        if self.train_bs_n_seqs % self._topo.data:
            yield ConfigError(
                f"a batch of {self.train_bs_n_seqs} does not divide over "
                f"{self._topo.data} data-parallel ranks",
                where="train_bs_n_seqs and model.parallel",
                fix=f"use a multiple of {self._topo.data}",
            )
        yield from held_out_problems(
            self.task.num_held_out, self._topo.data, where="model.parallel"
        )
        for role, options in self.held.items():
            if options.pool is not None:
                yield ConfigError(
                    "this experiment has no pools of model workers",
                    where=f"{role}.pool",
                    fix="leave it out",
                )
        if self.model.offload and len(self.held) == 1:
            yield ConfigError(
                "this experiment has one model, so no other would use the memory",
                where="model.offload",
                fix="leave it out; cpu_offload keeps the optimizer in CPU memory",
            )
        yield from layout_problems_of(
            self._places, self.held, default_path=self.model.path, built_in=self.init.shape()
        )

    def chosen(self, given: Collection[str]) -> tuple[ChosenSetting, ...]:
        """For a real model: learning rate, lengths, memory (parts/chosen_settings.py)."""
        path = self.model.path
        if path is None or (model := starting_model(path)) is None:
            return ()
        gpus, lora = self.resources().gpu > 0, self.model.lora.rank > 0
        proposed = chosen_for_sft(model, self.task.measured(path), gpus=gpus, lora=lora)
        return self.not_given(proposed, given)

    def remarks(self, given: Collection[str]) -> Iterator[str]:
        """Reports how many questions were counted."""
        yield from self.task.remarks(self.model.path)
        yield from self.task.conversation_warnings(self.model.path)
        yield from turn_end_warnings(self.model.path)

    def input_files(self) -> tuple[str, ...]:
        """Lists the question files, and the files of the starting model."""
        folder = absolute(self.model.path)
        weights = [] if folder is None else sorted(Path(folder).glob("*.safetensors"))
        return (*self.task.input_files(), *map(str, weights))

    def scheduling_setup(self) -> ExperimentScheduling:
        """Schedules one master, and as many model workers as the largest layout has processes."""
        return self.tasks({WorkerType.MODEL_WORKER: self._n_workers})

    def initial_setup(self) -> ExperimentConfig:
        """Builds the configuration from models and calls."""
        return ExperimentConfig(
            exp_ctrl=self.exp_ctrl,
            model_rpcs=self.calls(),
            dataset_keys=self.keys,
            deterministic=self.deterministic,
            model_worker=place_models(
                self._places,
                {role: self.role(role) for role in self.held},
                n_workers=self._n_workers,
                base_seed=self.seed,
                datasets=(self._answers("train"),),
                tokenizer_name_or_path=absolute(self.model.path),
                shuffle_dataset=self.task.shuffle,
                num_threads=self.resources().cpu,
            ),
            wandb=self.wandb,
            tensorboard=self.tensorboard,
        )

    def calls(self) -> tuple[MFCDef, ...]:
        """The calls of a step: the update."""
        return (self.call_on("model", self.call, ModelInterfaceType.TRAIN_STEP, self.keys),)

    def call_on(
        self, role: str, name: str, kind: ModelInterfaceType, reads: tuple[str, ...], **more: Any
    ) -> MFCDef:
        """Builds a call of the interface on a model; ``more`` are further fields."""
        options = self.held[role]
        return MFCDef(
            name=name,
            n_seqs=self.train_bs_n_seqs,
            interface_type=kind,
            interface_impl=self.interface(),
            model_name=ModelName(role),
            input_keys=reads,
            mb_spec=mb_spec_of(options),
            post_hooks=(OffloadHook(),) if options.offload else (),
            **more,
        )

    def role(self, name: str) -> RolePlacement:
        """A model, how it is held, and its held-out data."""
        options, trained = self.held[name], name == "model"
        return RolePlacement(
            model=self.start(compute_dtype(options, self.model, gpus=self.resources().gpu)),
            backend=backend_of(options, trained=trained),
            eval_dataset=self._answers("test") if trained and self.task.num_held_out else None,
        )

    def interface(self) -> ModelInterfaceAbstraction:
        """The interface that trains and evaluates."""
        return ModelInterfaceAbstraction("sft")

    def start(self, dtype: str) -> ModelAbstraction:
        """The starting model: of ``model.path``, or made from scratch."""
        if self.model.path is None:
            args = {"dtype": dtype, "seed": self.seed, **to_plain(self.init)}
            if not self.task.is_arithmetic:
                args["corpus"] = to_plain(self._answers("train"))
            return ModelAbstraction("tiny_llama", args)
        return ModelAbstraction("hf_causal_lm", {"path": absolute(self.model.path), "dtype": dtype})

    def _answers(self, split: str) -> DatasetAbstraction:
        return self.task.answers(split, max_answer_len=self.max_answer_len)


def sft_math() -> SFTExperiment:
    """Supervised fine-tuning on math questions with step-by-step answers."""
    return SFTExperiment()
