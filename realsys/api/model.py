"""Models: names and shapes of their copies, and what interfaces, backends and engines promise.

An *interface* says what is computed (a PPO update, a reward), a *backend* how (FSDP, Megatron, a
plain forward): it wraps a module into a ``PipelinableEngine``. Both are looked up by name
(realsys.api.registry). No torch here: tensors appear in annotations only, so that an experiment can
be described, and a custom interface declared, on a login node.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.option_fields import option

if TYPE_CHECKING:
    import torch

    from realsys.data.sequence_sample import SequenceSample
    from realsys.models.shape import ModelShape, Weight
    from realsys.weights.layouts.boxes import Box, Layout

# The first argument is a language model's ``Predictions`` (realsys.algorithms), or a critic's values.
LossFn = Callable[[Any, "SequenceSample"], Any]
LossWeightFn = Callable[["SequenceSample"], float]


@dataclass(frozen=True, order=True)
class ModelName:
    """One copy of a role's model: replica 0, 1, … of ``actor``, ``critic``, …"""

    role: str
    replica_id: int = 0

    def __str__(self) -> str:
        return f"{self.role}@{self.replica_id}"


@dataclass(frozen=True, kw_only=True)
class ProcessTopology:
    """Axes of the processes that hold one model copy: pipeline × data × tensor.

    Ranks count row-major, the tensor axis fastest: ``rank = (p · data + d) · tensor + t``.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        bad = {a: n for a in ("pipeline", "data", "tensor") if (n := getattr(self, a)) < 1}
        if bad:
            raise ConfigError(f"degrees below 1: {bad}", where="ProcessTopology", fix="1 means off")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.tensor

    def rank(self, *, pipeline: int, data: int, tensor: int) -> int:
        """Rank of the process at these coordinates."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, data, tensor) of ``rank``."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return pipeline, data, tensor

    def data_parallel_heads(self) -> list[int]:
        """One rank per data-parallel slot: last pipeline stage, tensor rank 0. They reply."""
        last = self.pipeline - 1
        return [self.rank(pipeline=last, data=d, tensor=0) for d in range(self.data)]

    def slot(self, data: int) -> list[int]:
        """Ranks that see the same data: all pipeline stages and tensor ranks of a data rank."""
        return [
            self.rank(pipeline=p, data=data, tensor=t)
            for p in range(self.pipeline)
            for t in range(self.tensor)
        ]

    def __str__(self) -> str:
        return f"d{self.data}t{self.tensor}p{self.pipeline}"

    @classmethod
    def parse(cls, text: str, *, where: str = "parallel") -> ProcessTopology:
        """Reads ``d2t1p1`` (letters in any order, each at most once, missing means 1).

        Raises:
            ConfigError: anything else.
        """
        axes = {"d": "data", "t": "tensor", "p": "pipeline"}
        parts = re.findall(r"([dtp])([1-9][0-9]*)", text)
        letters = [letter for letter, _ in parts]
        given = "".join(a + n for a, n in parts)
        if not parts or given != text or len(set(letters)) != len(parts) or len(text) > 20:
            raise ConfigError(
                f"{text!r} is no parallel layout",
                where=where,
                fix="write data, tensor and pipeline degrees, e.g. d2t1p1",
            )
        return cls(**{axes[letter]: int(number) for letter, number in parts})


@dataclass(frozen=True, kw_only=True)
class ModelShardID:
    """The piece of a model copy that one process holds."""

    model_name: ModelName
    topo: ProcessTopology
    parallelism_rank: int = 0

    def __str__(self) -> str:
        return f"{self.model_name}/{self.topo}#{self.parallelism_rank}"


@dataclass(frozen=True)
class ModelAbstraction:
    """How to make a module: a registered model name and its arguments."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBackendAbstraction:
    """Which registered backend, with which arguments."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelInterfaceAbstraction:
    """Which registered interface, with which arguments: ``("ppo_actor", {"eps_clip": 0.2})``."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetAbstraction:
    """Which registered data set, with which arguments."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


class ModelInterfaceType(StrEnum):
    """Kind of computation of a model function call."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """Length of a training run; schedules (learning rate) are functions of it."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    benchmark_steps: int | None = None  # stop after so many steps, whatever the epochs say

    @property
    def total_train_steps(self) -> int:
        """Number of global steps. A rest smaller than one batch at the very end is not trained."""
        steps = self.total_train_epochs * self.dataset_size // self.train_batch_size
        return steps if self.benchmark_steps is None else min(steps, self.benchmark_steps)


@dataclass
class StepInfo:
    """Which update made the weights of a model."""

    epoch: int = 0
    epoch_step: int = 0
    global_step: int = 0


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The torch process groups of one model copy that a process is in; None where it is alone.

    Attributes:
        copy: all processes of the copy, in the order of their ranks.
        data: same pipeline stage and tensor rank. tensor, pipeline: likewise along these axes.
        slot: pipeline × tensor, the processes that see the same data; ranks ascend.
        ends: first and last pipeline stage of the same data and tensor rank, where embedding and
            head of tied weights sit; None in the middle.
    """

    copy: Any = None
    data: Any = None
    tensor: Any = None
    pipeline: Any = None
    slot: Any = None
    ends: Any = None


class ModuleSource(abc.ABC):
    """Where a module comes from, before a backend decides which part of it this process needs.

    A model factory may put one into ``Model.module`` instead of a module.
    """

    critic: bool
    dtype: str

    @abc.abstractmethod
    def load(self) -> Any:
        """The whole module on the model's device, with its weights."""

    @abc.abstractmethod
    def empty(self) -> Any:
        """The whole module with weights that hold nothing yet: another layout will fill them."""

    def skeleton(self, dtype: str | None = None) -> Any:
        """The whole module whose weights have shapes but no memory; ``read_into`` fills what is cut of it.

        None where the module can only be loaded whole. ``dtype``: of the weights, if not the source's.
        """
        return None

    @abc.abstractmethod
    def config(self) -> Any:
        """The Hugging Face ``PretrainedConfig``."""

    @abc.abstractmethod
    def read(self, name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> torch.Tensor:
        """A part of the weight ``name``, in ``dtype`` on the CPU, without reading the rest.

        ``score.weight`` and ``score.bias`` of a critic that starts from a language model are 0.
        Raises KeyError for a weight that is not there.
        """

    def read_into(
        self, view: torch.Tensor, name: str, start: tuple[int, ...], stop: tuple[int, ...]
    ) -> None:
        """As ``read``, into ``view``: on its device and in its type, whatever ``dtype`` is."""
        view.copy_(self.read(name, start, stop))

    @abc.abstractmethod
    def weights(self) -> tuple[Weight, ...]:
        """Names and whole shapes of all weights; tied ones are named once."""

    @abc.abstractmethod
    def shape(self) -> ModelShape:
        """Sizes of the model. Raises ConfigError for a family that can't be cut along all axes."""


@dataclass
class Model:
    """A model copy in one process: the module (or, once initialised, its engine) and its company.

    ``module`` is a ``torch.nn.Module`` or a ``ModuleSource`` until a backend's ``initialize`` has
    replaced it by a ``PipelinableEngine``. ``filled`` False: the weights come from another copy,
    nothing is to be loaded. ``dtype`` is what it computes in; ``trains`` and ``averaged`` (it follows
    another copy's weights) decide with the backend in what type it holds them
    (``ModelBackend.held_dtype``).
    """

    name: ModelName
    module: Any
    tokenizer: Any
    device: str
    dtype: str
    version: StepInfo = field(default_factory=StepInfo)
    ft_spec: FinetuneSpec | None = None
    topology: ProcessTopology = field(default_factory=ProcessTopology)
    rank: int = 0
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    base_seed: int = 1
    filled: bool = True
    trains: bool = True
    averaged: bool = False

    def inc_version(self) -> None:
        """Counts one update of the weights."""
        self.version.global_step += 1


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    """Sampling settings.

    ``temperature`` scales logits before softmax; log-probs returned are those of the sampled
    distribution at that temperature, over the whole vocabulary (``top_p`` and ``top_k`` do not
    renormalise them).
    """

    n: int = option(1, "answers to each prompt; experiments with group_size set it by that")
    max_new_tokens: int = option(256, "longest answer; a longer one is cut", unit="tokens")
    min_new_tokens: int = option(
        0, "shortest answer: until then no end token is sampled", unit="tokens"
    )
    greedy: bool = option(False, "always take the most probable token")
    temperature: float = option(1.0, "divides the logits: above 1 evens out, below 1 sharpens")
    top_p: float = option(1.0, "sample from the most probable tokens of this total probability")
    top_k: int = option(0, "sample from so many of the most probable tokens; 0: from all")
    stop_token_ids: tuple[int, ...] = option((), "tokens that end an answer, besides the end token")

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise ConfigError(
                f"{name} is {getattr(self, name)}", where=f"generation.{name}", fix=f"use {rule}"
            )

        if self.n < 1:
            refuse("n", "1 or more answers a prompt")
        if self.max_new_tokens < 1:
            refuse("max_new_tokens", "1 or more tokens")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            refuse("min_new_tokens", f"0 … max_new_tokens ({self.max_new_tokens})")
        if self.temperature <= 0:
            refuse("temperature", "a number above 0, or greedy=true")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "a number in (0, 1]")
        if self.top_k < 0:
            refuse("top_k", "0 (off) or more")


class PipelinableEngine(abc.ABC):
    """A module that a backend made ready to train, run forward or generate.

    Batches are packed ``SequenceSample``s; the key ``packed_input_ids`` (int64) is what the model
    reads. Outputs are packed in the same order.
    """

    @abc.abstractmethod
    def train_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: Literal["global", "dp"] = "global",
        mb_spec: MicroBatchSpec | None = None,
        version_steps: int = 0,
    ) -> dict[str, float]:
        """One optimizer step on ``input_``.

        Args:
            loss_fn: (model output, micro-batch) → mean loss over the micro-batch's weight (scalar
                tensor), or (loss, stats) with stats a dict of scalar tensors that are averaged by
                weight. The output is a critic's values ``[tokens]``; of a language model it is
                ``Predictions``, which makes log-probabilities and logits of the rows asked for. A
                micro-batch may have some of the sequences of an id (``SequenceSample.microbatches``).
            loss_weight_fn: micro-batch → its weight (number of loss tokens).
            token_normalize_scope: ``global`` divides by the weight of all data-parallel ranks,
                ``dp`` by this rank's own.
            version_steps: global step, for the learning-rate schedule.
        Returns:
            ``loss``, ``grad_norm``, ``lr`` and the averaged stats, equal on all ranks.
        """

    @abc.abstractmethod
    def eval_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        mb_spec: MicroBatchSpec | None = None,
    ) -> dict[str, float]:
        """The same means as ``train_batch`` with no update."""

    @abc.abstractmethod
    def forward(
        self,
        input_: SequenceSample,
        *,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: Callable[[Any, SequenceSample], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Model output ``[tokens, …]`` in input order, no gradients: values, or logits.

        A language model's logits at the last token of a sequence, which predict nothing that is
        there, may be any numbers, here and in ``Predictions``.

        ``post_hook`` (output as a loss gets it, micro-batch) → ``[tokens, …]`` runs on each
        micro-batch before they are joined, so that logits of the whole batch never exist at once.
        """

    @abc.abstractmethod
    def generate(
        self,
        input_: SequenceSample,
        *,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        mb_spec: MicroBatchSpec | None = None,
        seed: int = 0,
    ) -> SequenceSample:
        """Answers ``packed_prompts``, ``gconfig.n`` times each.

        Returns a sample with the same ids and the keys ``packed_input_ids`` (int64, prompt and
        answer), ``prompt_mask`` (bool, True on the prompt), ``packed_logprobs`` (float32, 0 on the
        prompt; the log-prob of the token at that place) and ``seq_no_eos_mask`` (bool, one a
        sequence: cut off without an end token). A pure function of weights, prompts, ids and seed.
        """

    @abc.abstractmethod
    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        """Writes a Hugging Face directory (all ranks call it; one writes)."""

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, torch.Tensor]]]:
        """What this process holds of the model: Hugging Face name → (box of the whole tensor, a view).

        Writing to a view changes the weight; the view has the box's shape and the type that
        ``ModelBackend.held_dtype`` says. Tied weights are named once.
        """
        raise NotImplementedError(f"{type(self).__name__} can't exchange weights")

    def weights_changed(self) -> None:
        """Told after somebody wrote to the views of ``held_weights``."""

    def offload(self) -> None:
        """Moves weights and optimizer to CPU memory. Nothing may be computed until ``onload``."""

    def onload(self) -> None:
        """Takes back what ``offload`` moved. Does nothing when nothing was."""

    def drop_copies(self) -> None:
        """Frees what can be made again: whole weights that were gathered."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for recovery: weights, optimizer. Tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave, bit for bit."""


class ModelBackend(abc.ABC):
    """Wraps a module into an engine. Subclasses implement ``_initialize`` only."""

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        """Sets the run's length on ``model`` and makes its engine."""
        model.ft_spec = spec
        return self._initialize(model)

    @abc.abstractmethod
    def _initialize(self, model: Model) -> Model:
        """Replaces ``model.module`` by a ``PipelinableEngine`` and returns the model."""

    def layout(self, source: ModuleSource, topology: ProcessTopology) -> Layout:
        """Which part of each weight every process of a copy holds, without making any of them.

        Must agree with what ``PipelinableEngine.held_weights`` gives. Needed by weight reallocation.
        """
        raise NotImplementedError(f"{type(self).__name__} can't tell its layout")

    def held_dtype(
        self, dtype: str, *, trained: bool, averaged: bool = False, weight: str = ""
    ) -> str:
        """The type of ``PipelinableEngine.held_weights`` of a model that computes in ``dtype``.

        Args:
            averaged: the model follows another copy's weights. weight: which one, where types differ.
        """
        return dtype

    def destroy(self, model: Model) -> None:
        """Frees what the backend holds for ``model``."""


class ModelInterface(abc.ABC):
    """What is computed on a model. Implement the methods your function calls need.

    Usually a dataclass, so that ``ModelInterfaceAbstraction.args`` are its fields.
    """

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample | None:
        """Makes sequences. The reply's keys are the call's output keys."""
        raise NotImplementedError(f"{type(self).__name__} has no generate")

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample | None:
        """Computes new keys for ``data`` without changing the model."""
        raise NotImplementedError(f"{type(self).__name__} has no inference")

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """Updates the model on ``data``; returns statistics for the metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no train_step")

    def evaluate(
        self, model: Model, eval_batches: Iterable[SequenceSample], mb_spec: MicroBatchSpec
    ) -> dict[str, Any]:
        """Statistics on held-out data; the reserved key ``samples`` holds example records.

        ``mb_spec`` is that of the role's calls: what fits there fits here.
        """
        return {}

    def save(self, model: Model, save_dir: str) -> None:
        """Writes the model for use elsewhere. Training interfaces implement it."""

    def mock(
        self, interface_type: ModelInterfaceType, model: Model, data: SequenceSample
    ) -> SequenceSample:
        """A made-up reply with the right keys and shapes, for timing runs without compute."""
        raise NotImplementedError(f"{type(self).__name__} has no mock")

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart besides the model (controllers, running moments)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""
