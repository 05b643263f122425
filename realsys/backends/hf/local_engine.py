"""What engines over Hugging Face modules and over parts of Megatron's have in common.

Passes over micro-batches, steps of training, generation, and weights that stay frozen. What is theirs is
in hf/engine.py and fsdp.py, and in megatron/.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from realsys.algorithms.predictions import Predictions, nothing_of
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import CheckpointError, ConfigError, GradientNotFinite
from realsys.api.model import (
    SKIPPED_STEPS,
    GenerationHyperparameters,
    LossFn,
    LossWeightFn,
    PipelinableEngine,
)
from realsys.api.options import OptimizerOptions
from realsys.backends.hf.data_parallel import DataParallel
from realsys.backends.hf.lr_schedule import learning_rate
from realsys.backends.hf.offload import Offloadable
from realsys.backends.hf.slot_generation import generate_in_slot
from realsys.backends.hf.weighted_means import WeightedMeans
from realsys.data.answers_layout import INPUT, answer_row, answers_sample
from realsys.data.packing import Run
from realsys.data.sequence_sample import SequenceSample
from realsys.generation.cache_bytes import ROWS_OF_GPU
from realsys.generation.engine.cache_room import room_on_gpu
from realsys.generation.engine.embedded_engine import GenerationResult, generate
from realsys.generation.engine.sampling import row_seed
from realsys.generation.engine.textless_ids import textless_ids
from realsys.models.hf import end_token_ids
from realsys.weights.layouts.boxes import Box

logger = logging.getLogger(__name__)

PROMPTS = "packed_prompts"
_IN_A_ROW = "skipped_in_a_row"  # in an engine's state, if there are any
PostHook = Callable[[Any, SequenceSample], Tensor]
MicroBatches = Sequence[tuple[list[Run], SequenceSample]]
# What is done with the output of a micro-batch, given its number; in training it returns the loss.
UseOutput = Callable[[Tensor | Predictions, int], Tensor]


class LocalEngine(Offloadable, PipelinableEngine):
    """Engine over a module in this process; subclasses run micro-batches through it.

    Attributes:
        ranks: the data-parallel ranks.
        slot: group of the processes that see the same data; None if this one is alone.
    """

    base_seed: int
    ranks: DataParallel
    slot: Any

    @abc.abstractmethod
    def whole_module(self) -> nn.Module:
        """Returns a plain Hugging Face module with full weights; collective over the slot."""

    @abc.abstractmethod
    def _run(self, pieces: MicroBatches, use_output: UseOutput) -> None:
        """Runs all micro-batches; where outputs are known, passes them to ``use_output``."""

    def _metrics(self, means: WeightedMeans) -> dict[str, float]:
        return means.result()

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs)

    @torch.no_grad()
    def eval_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        mb_spec: MicroBatchSpec | None = None,
    ) -> dict[str, float]:
        pieces = self.microbatches(input_, mb_spec)
        means = WeightedMeans(self.ranks, microbatch_weights(pieces, loss_weight_fn), "global")
        self._run(pieces, lambda output, i: means.add(loss_fn(output, pieces[i][1]), i))
        return self._metrics(means)

    @torch.no_grad()
    def forward(
        self,
        input_: SequenceSample,
        *,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: PostHook | None = None,
    ) -> Tensor:
        pieces = self.microbatches(input_, mb_spec)
        by_run: dict[Run, Tensor] = {}

        def keep(output: Tensor | Predictions, i: int) -> Tensor:
            runs, mb = pieces[i]
            if post_hook is not None:
                output = post_hook(output, mb)
            whole = output.logits() if isinstance(output, Predictions) else output
            rows = torch.split(whole, list(mb.meta.rows_per_id(INPUT)))
            by_run.update(zip(runs, rows, strict=False))  # a repeat has no runs
            return whole

        self._run(pieces, keep)
        return self._joined([by_run[run] for run in sorted(by_run)])

    def generate(
        self,
        input_: SequenceSample,
        *,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        mb_spec: MicroBatchSpec | None = None,
        seed: int = 0,
    ) -> SequenceSample:
        """As in the base class. Each process of a data-parallel slot generates a share of the answers."""
        return answer_prompts(
            self.whole_module(),
            input_,
            tokenizer=tokenizer,
            gconfig=gconfig,
            mb_spec=mb_spec,
            base_seed=self.base_seed ^ seed,
            generate=partial(generate_in_slot, group=self.slot) if self.slot else generate,
        )

    def microbatches(self, input_: SequenceSample, mb_spec: MicroBatchSpec | None) -> MicroBatches:
        """Splits ``input_`` into micro-batches on this engine's device, each with its runs of sequences.

        Equal on all processes of a slot. Other data-parallel ranks may have more or fewer: they synchronise
        only at the end of a step. Where a pass is collective over ranks too, a subclass adds micro-batches
        without runs: repeats that keep ranks in step, whose output is ignored.
        """
        self.require_onloaded("a pass")
        return input_.to(self.device).microbatches(mb_spec or MicroBatchSpec())


class TrainingEngine(LocalEngine):
    """Engine that trains. Precedes the engine that it extends among the bases.

    Attributes:
        skipped_in_a_row: the last optimizer steps, which were left out.
    """

    options: OptimizerOptions
    total_steps: int
    skipped_in_a_row: int = 0

    @abc.abstractmethod
    def _accumulate(self, pieces: MicroBatches, loss: UseOutput) -> None:
        """Runs all micro-batches forward and backward; the gradient is the mean over ranks."""

    @abc.abstractmethod
    def _step(self, lr: float) -> float:
        """Clips gradients, updates weights and returns the norm before clipping, equal on all ranks. If it
        is not finite, nothing is updated.
        """

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
        pieces = self.microbatches(input_, mb_spec)
        weights = microbatch_weights(pieces, loss_weight_fn)
        means = WeightedMeans(self.ranks, weights, token_normalize_scope)

        def loss(output: Tensor | Predictions, i: int) -> Tensor:
            scaled = means.add(loss_fn(output, pieces[i][1]), i)
            return scaled if means.counts(i) else nothing_of(output)

        self._accumulate(pieces, loss)
        stats = self._metrics(means)
        lr = learning_rate(self.options, step=version_steps, total_steps=self.total_steps)
        norm = self._step(lr)
        stats |= {"grad_norm": norm, "lr": lr}
        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return stats
        self._skipped(norm)
        return {**stats, SKIPPED_STEPS: 1.0}

    def _skipped(self, norm: float) -> None:
        """Counts a step that was left out. Raises GradientNotFinite: it was one too many."""
        self.skipped_in_a_row += 1
        most = self.options.max_skipped_steps
        logger.warning("step skipped grad_norm=%s in_a_row=%d", norm, self.skipped_in_a_row)
        if self.skipped_in_a_row >= most:
            before = f", as of the {most - 1} steps before" if most > 1 else ""
            raise GradientNotFinite(
                f"the gradient's norm is {norm}{before}; the weights were left as they are",
                where=f"{type(self).__name__}.train_batch",
                fix="look at the batches in skipped_batches/ of the trial's folder, for extreme rewards or "
                "log-probabilities; lower the learning rate",
            )

    def _skipped_state(self) -> dict[str, int]:
        """Part of ``state_dict``, so that a resumed run ends where this one would."""
        return {_IN_A_ROW: self.skipped_in_a_row} if self.skipped_in_a_row else {}

    def _load_skipped(self, state: Mapping[str, Any]) -> None:
        """Restores what ``_skipped_state`` returned."""
        self.skipped_in_a_row = int(state.get(_IN_A_ROW, 0))


def other_layout(engine: LocalEngine, what: str) -> CheckpointError:
    """Makes the error for a state of another model or layout than the engine's."""
    return CheckpointError(
        what,
        where=f"{type(engine).__name__}.load_state_dict",
        fix="resume with the model and the parallel layout that wrote the checkpoint",
    )


class ForwardOnly(LocalEngine):
    """Engine of frozen weights. Precedes the engine that it restricts among the bases.

    A copy that follows another by small steps (``ParamReallocHook.eta`` below 1) would not move in half
    precision: each step is rounded away. Such a copy keeps float32 averages, which ``held_weights``
    exposes; after each weight movement the compute weights are rounded from them.
    """

    trained_by = "fsdp"  # a backend that would train the same model
    _averages: Mapping[str, Sequence[tuple[Box, Tensor]]] | None = None

    def train_batch(self, *_: Any, **settings: Any) -> NoReturn:
        raise ConfigError(
            "a model with the inference backend can't be trained",
            where=f"{type(self).__name__}.train_batch",
            fix=f"give this role a training backend, e.g. backend={self.trained_by}",
        )

    def keep_averages(self) -> None:
        """Holds float32 weights from now on, beside those that compute."""
        self._averages = {
            name: [(box, x.to(torch.float32, copy=True)) for box, x in parts]
            for name, parts in super().held_weights().items()
        }

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, Tensor]]]:
        held = super().held_weights()
        return held if self._averages is None else self._averages

    def weights_changed(self) -> None:
        if self._averages is not None:
            for name, parts in super().held_weights().items():
                for (_, x), (_, average) in zip(parts, self._averages[name], strict=True):
                    x.copy_(average)
        super().weights_changed()

    def own_memory(self) -> list[Tensor]:
        averages = (x for parts in (self._averages or {}).values() for _, x in parts)
        return [*super().own_memory(), *averages]


def microbatch_weights(
    microbatches: MicroBatches, loss_weight_fn: LossWeightFn
) -> list[float | Mapping[str, float]]:
    """Weight of each micro-batch, or those of its loss's components; 0 for a repeat."""
    return [loss_weight_fn(mb) if runs else 0.0 for runs, mb in microbatches]


def answer_prompts(
    module: nn.Module,
    input_: SequenceSample,
    *,
    tokenizer: Any,
    gconfig: GenerationHyperparameters,
    mb_spec: MicroBatchSpec | None,
    base_seed: int,
    generate: Callable[..., GenerationResult] = generate,
) -> SequenceSample:
    """Generates as ``PipelinableEngine.generate`` specifies, with a plain module of whole weights.

    Args:
        generate: generates for rows of prompts as ``generation.engine.generate`` does.
    """
    device = next(module.parameters()).device
    prompts = [x.data[PROMPTS].to(device) for x in input_.select([PROMPTS]).unpack()]
    seeds = [row_seed(base_seed, i, k, 0) for i in input_.ids for k in range(gconfig.n)]
    asked = [prompt for prompt in prompts for _ in range(gconfig.n)]
    ends = end_token_ids(tokenizer, getattr(module, "generation_config", None))
    vocabulary = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    result = generate(
        module,
        asked,
        gconfig,
        eos_token_ids=ends,
        pad_token_id=tokenizer.pad_token_id or 0,
        row_seeds=torch.tensor(seeds, dtype=torch.int64),
        max_batch=ROWS_OF_GPU if device.type == "cuda" else None,
        max_tokens=_cache_tokens(module, mb_spec, len(asked)),
        textless=textless_ids(tokenizer, vocabulary=vocabulary, ends=ends),
    )
    kept = repeat(None) if result.kept is None else result.kept
    rows = list(map(answer_row, asked, result.tokens, result.logprobs, kept))
    groups = [rows[i : i + gconfig.n] for i in range(0, len(rows), gconfig.n)]
    return answers_sample(input_.ids, groups, result.truncated, metadata=input_.meta.metadata)


def _cache_tokens(module: nn.Module, mb_spec: MicroBatchSpec | None, num_rows: int) -> int | None:
    """Size of the key-value cache in tokens, independent of the trainer's micro-batch.

    On a CPU the default is that of the micro-batch, since decoding few rows there costs little more
    per row.
    """
    if mb_spec is not None and mb_spec.max_cache_tokens is not None:
        return mb_spec.max_cache_tokens
    if next(module.parameters()).is_cuda:
        return room_on_gpu(module, num_rows=num_rows)
    return None if mb_spec is None else mb_spec.max_tokens_per_mb
