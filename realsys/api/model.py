"""Names and topologies of model copies; contracts of interfaces, backends and engines.

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

from realsys.api.basics.option_fields import option
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from realsys.data.sequence_sample import SequenceSample
    from realsys.models.shape import ModelShape, Weight
    from realsys.weights.layouts.boxes import Box, Layout

# The first argument is a language model's ``Predictions`` (realsys.algorithms), or a critic's values.
LossFn = Callable[[Any, "SequenceSample"], Any]
# One weight, or that of each component of the loss by name.
LossWeightFn = Callable[["SequenceSample"], float | Mapping[str, float]]


@dataclass(frozen=True, order=True)
class ModelName:
    """Name of one copy of a role's model: replica 0, 1, … of ``actor``, ``critic``, …"""

    role: str
    replica_id: int = 0

    def __str__(self) -> str:
        return f"{self.role}@{self.replica_id}"


@dataclass(frozen=True, kw_only=True)
class ProcessTopology:
    """Axis sizes of the process grid that holds one model copy: pipeline × data × tensor.

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
        """Returns the rank of the process at these coordinates."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """Returns (pipeline, data, tensor) of ``rank``."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return pipeline, data, tensor

    def data_parallel_heads(self) -> list[int]:
        """Ranks that reply for each data-parallel slot: last pipeline stage, tensor rank 0."""
        last = self.pipeline - 1
        return [self.rank(pipeline=last, data=d, tensor=0) for d in range(self.data)]

    def slot(self, data: int) -> list[int]:
        """Ranks that see the same data: all pipeline stages and tensor ranks of data rank ``data``."""
        return [
            self.rank(pipeline=p, data=data, tensor=t)
            for p in range(self.pipeline)
            for t in range(self.tensor)
        ]

    def __str__(self) -> str:
        return f"d{self.data}t{self.tensor}p{self.pipeline}"

    @classmethod
    def parse(cls, text: str, *, where: str = "parallel") -> ProcessTopology:
        """Parses ``d2t1p1`` (letters in any order, each at most once, missing means 1).

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
class PluginAbstraction:
    """A registered plug-in and its arguments; the subclasses say of which kind."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


class ModelAbstraction(PluginAbstraction):
    """How to build a module: a registered model factory and its arguments."""


class ModelBackendAbstraction(PluginAbstraction):
    """A registered backend and its arguments."""


class ModelInterfaceAbstraction(PluginAbstraction):
    """A registered interface and its arguments: ``("ppo_actor", {"eps_clip": 0.2})``."""


class DatasetAbstraction(PluginAbstraction):
    """A registered data set and its arguments."""


class ModelInterfaceType(StrEnum):
    """Kind of computation that a model function call performs."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """Length of a training run, on which schedules (learning rate) depend."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    benchmark_steps: int | None = None  # stop after this many steps, regardless of epochs

    @property
    def total_train_steps(self) -> int:
        """Number of global steps; a remainder smaller than one batch at the end is not trained."""
        steps = self.total_train_epochs * self.dataset_size // self.train_batch_size
        return steps if self.benchmark_steps is None else min(steps, self.benchmark_steps)


@dataclass
class StepInfo:
    """Step counters of the update that made a model's weights."""

    epoch: int = 0
    epoch_step: int = 0
    global_step: int = 0


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The torch process groups of one model copy that a process belongs to; None where it is alone.

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
    """Where a module's weights come from, before a backend selects this process's part.

    A model factory may put one into ``Model.module`` instead of a module.
    """

    critic: bool
    dtype: str

    @abc.abstractmethod
    def load(self) -> Any:
        """Loads the whole module with its weights on the model's device."""

    @abc.abstractmethod
    def empty(self) -> Any:
        """Builds the whole module with uninitialised weights, to be filled from another copy."""

    def skeleton(self, dtype: str | None = None) -> Any:
        """Builds the whole module with weights that have shapes but no memory.

        ``read_into`` fills the part that is kept. None if the module can only be loaded whole.
        ``dtype`` is that of the weights, by default the source's.
        """
        return None

    @abc.abstractmethod
    def config(self) -> Any:
        """Returns the Hugging Face ``PretrainedConfig``."""

    @abc.abstractmethod
    def read(self, name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> torch.Tensor:
        """Reads a part of the weight ``name``, in ``dtype`` on the CPU, without reading the rest.

        ``score.weight`` and ``score.bias`` of a critic that starts from a language model are 0.
        Raises KeyError for a weight that is not there.
        """

    def read_into(
        self, view: torch.Tensor, name: str, start: tuple[int, ...], stop: tuple[int, ...]
    ) -> None:
        """Reads a part of ``name`` into ``view``, on its device and in its dtype instead of ``dtype``."""
        view.copy_(self.read(name, start, stop))

    @abc.abstractmethod
    def weights(self) -> tuple[Weight, ...]:
        """Names and full shapes of all weights; tied weights are named once."""

    @abc.abstractmethod
    def shape(self) -> ModelShape:
        """Dimensions of the model. Raises ConfigError for a family that can't be cut along all axes."""


@dataclass
class Model:
    """One process's part of a model copy: module or engine, tokenizer, groups and version.

    ``module`` is a ``torch.nn.Module`` or a ``ModuleSource`` until a backend's ``initialize`` replaces
    it by a ``PipelinableEngine``. If ``filled`` is False, weights come from another copy and none are
    loaded. ``dtype`` is the compute dtype; ``trains`` and ``averaged`` (a moving average of another
    copy) determine, with the backend, the dtype of the stored weights (``ModelBackend.held_dtype``).
    A classifier's score of a sequence is read at the last token that is not ``score_skips``; None: at the
    last.
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
    score_skips: int | None = None

    def inc_version(self) -> None:
        """Advances the version after one update of the weights."""
        self.version.global_step += 1


SKIPPED_STEPS = (
    "skipped_steps"  # statistic of updates: optimizer steps left out, where there are any
)
LEAST_TEMPERATURE = 1e-6  # below it logits divided by it overflow float32


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    """Sampling settings.

    ``temperature`` divides the logits before softmax. Log-probs of a training run's answers are those of
    the distribution that is sampled from: where ``top_p``, ``top_k`` or ``min_new_tokens`` leave tokens
    out (``restricts``), the renormalised one over the kept tokens. Which were kept is recorded with each
    token, and all later log-probs are over the same.
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

    @property
    def restricts(self) -> bool:
        """True if some tokens are sampled from a part of the vocabulary; greedy picks count as of all."""
        leaves_out = self.top_p < 1 or self.top_k > 0 or self.min_new_tokens > 0
        return leaves_out and not self.greedy

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
        if not self.temperature >= LEAST_TEMPERATURE:
            refuse("temperature", f"{LEAST_TEMPERATURE:g} or more, or greedy=true")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "a number in (0, 1]")
        if self.top_k < 0:
            refuse("top_k", "0 (off) or more")


class PipelinableEngine(abc.ABC):
    """A module that a backend has prepared for training, forward passes or generation.

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
        """Performs one optimizer step on ``input_``.

        Args:
            loss_fn: (model output, micro-batch) → mean loss over the micro-batch's weight (scalar
                tensor, or one for each component by name, which add up), or (loss, stats) with stats
                a dict of scalar tensors that are averaged by the first component's weight. The output is a
                critic's values ``[tokens]``; of a language model it is ``Predictions``, which computes
                log-probabilities and logits of selected rows. A micro-batch may hold only some of an id's
                sequences (``SequenceSample.microbatches``).
            loss_weight_fn: micro-batch → its weight (number of loss tokens); of a loss in components,
                the weight of each by name: each is divided by its own, over all micro-batches and ranks.
            token_normalize_scope: ``global`` divides by the weight of all data-parallel ranks,
                ``dp`` by this rank's own.
            version_steps: global step, for the learning-rate schedule.
        Returns:
            ``loss`` (of several components also ``loss/<name>``), ``grad_norm``, ``lr`` and the averaged
            stats, equal on all ranks. ``skipped_steps`` is 1 if ``grad_norm`` is not finite: then weights
            and optimizer are as before, and other figures may not be finite either.
        Raises:
            GradientNotFinite: that was the last of as many in a row as the backend allows.
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
        """Computes the same means as ``train_batch``, without an update."""

    @abc.abstractmethod
    def forward(
        self,
        input_: SequenceSample,
        *,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: Callable[[Any, SequenceSample], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Computes the model output ``[tokens, …]`` in input order without gradients: values or logits.

        A language model's logits at the last token of a sequence predict no token of the sample and
        are unspecified, here and in ``Predictions``.

        ``post_hook`` (output in the form that losses get, micro-batch) → ``[tokens, …]`` runs on each
        micro-batch before concatenation, so that logits of the whole batch never exist at once.
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
        """Generates ``gconfig.n`` answers to each of ``packed_prompts``.

        Returns a sample with the same ids and the keys ``packed_input_ids`` (int64, prompt and
        answer), ``prompt_mask`` (bool, True on the prompt), ``packed_logprobs`` (float32, 0 on the
        prompt; the log-prob of the token at that position) and ``seq_no_eos_mask`` (bool, one a
        sequence: cut off without an end token); if ``gconfig.restricts`` also the kept sets
        (realsys/data/answers_layout.py). A pure function of weights, prompts, ids and seed.
        """

    @abc.abstractmethod
    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        """Writes a Hugging Face directory (all ranks call it; one writes)."""

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, torch.Tensor]]]:
        """Weights that this process holds: Hugging Face name → (box of the whole tensor, a view).

        Writing to a view changes the weight; the view has the box's shape and the dtype given by
        ``ModelBackend.held_dtype``. Tied weights are named once.
        """
        raise NotImplementedError(f"{type(self).__name__} can't exchange weights")

    def weights_changed(self) -> None:
        """Must be called after writing to the views of ``held_weights``."""

    def offload(self) -> None:
        """Moves weights and optimizer state to CPU memory; nothing is computed until ``onload``."""

    def onload(self) -> None:
        """Moves back what ``offload`` moved. Does nothing if nothing was offloaded."""

    def drop_copies(self) -> None:
        """Frees buffers that can be recomputed, such as gathered whole weights."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for recovery: weights, optimizer. Tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores, bit for bit, what ``state_dict`` returned."""


class ModelBackend(abc.ABC):
    """Wraps a module into an engine. Subclasses implement ``_initialize`` only."""

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        """Sets the run's length on ``model`` and creates its engine."""
        model.ft_spec = spec
        return self._initialize(model)

    @abc.abstractmethod
    def _initialize(self, model: Model) -> Model:
        """Replaces ``model.module`` by a ``PipelinableEngine`` and returns the model."""

    def layout(self, source: ModuleSource, topology: ProcessTopology) -> Layout:
        """Part of each weight that every process of a copy holds, computed without allocating any.

        Must agree with ``PipelinableEngine.held_weights``. Used by weight reallocation.
        """
        raise NotImplementedError(f"{type(self).__name__} can't tell its layout")

    def held_dtype(
        self, dtype: str, *, trained: bool, averaged: bool = False, weight: str = ""
    ) -> str:
        """Dtype of ``PipelinableEngine.held_weights`` for a model that computes in ``dtype``.

        Args:
            averaged: the model is a moving average of another copy. weight: its name, if dtypes differ.
        """
        return dtype

    def destroy(self, model: Model) -> None:
        """Frees the backend's resources for ``model``."""


class ModelInterface(abc.ABC):
    """Computation of an algorithm on a model. Implement the methods that your function calls need.

    Usually a dataclass, so that ``ModelInterfaceAbstraction.args`` are its fields.
    """

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample | None:
        """Generates sequences. The keys of the reply are the call's output keys."""
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
        """Computes statistics on held-out data; the reserved key ``samples`` holds example records.

        ``mb_spec`` is that of the role's calls, so its limits fit the memory here too.
        """
        return {}

    def save(self, model: Model, save_dir: str) -> None:
        """Writes the model for use elsewhere. Implemented by training interfaces."""

    def mock(
        self, interface_type: ModelInterfaceType, model: Model, data: SequenceSample
    ) -> SequenceSample:
        """Makes a synthetic reply with the right keys and shapes, for timing runs without compute."""
        raise NotImplementedError(f"{type(self).__name__} has no mock")

    def state_dict(self) -> dict[str, Any]:
        """State besides the model that must survive a restart (controllers, running moments)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
