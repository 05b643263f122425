"""Base of engines over Hugging Face modules: forward, evaluation, generation, saving.

Batches are packed and pass through the module packed, with a group's common prefix computed once
(packed_attention.py). Modules of unsupported families get a rectangle padded on the right, where causal
attention never attends to padding, so no mask is needed. Either way the result doesn't depend on how a
batch is split. Training is in fsdp.py. Modules always stay in evaluation mode: dropout would make a policy
differ from the one that sampled.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from realsys.algorithms.predictions import Predictions
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import (
    GenerationHyperparameters,
    LossFn,
    LossWeightFn,
    Model,
    PipelinableEngine,
)
from realsys.api.options import LoRAOptions
from realsys.backends.hf import lora
from realsys.backends.hf.data_parallel import DataParallel
from realsys.backends.hf.loading import save_streamed
from realsys.backends.hf.offload import Offloadable
from realsys.backends.hf.sharding import boxes, free_gathered_weights, local_shard, plain_copy
from realsys.backends.hf.slot_generation import generate_in_slot
from realsys.backends.hf.weighted_means import WeightedMeans
from realsys.backends.kernels.cpu_linear import multiply_by_onednn
from realsys.backends.kernels.packed_attention import can_pack, predict_packed, run_packed
from realsys.data.answers_layout import INPUT, answer_row, answers_sample
from realsys.data.packing import Run
from realsys.data.ragged import pad_packed, unpad_to_packed
from realsys.data.sequence_sample import SequenceSample
from realsys.generation.cache_bytes import ROWS_OF_GPU
from realsys.generation.engine.cache_room import room_on_gpu
from realsys.generation.engine.embedded_engine import GenerationResult, generate
from realsys.generation.engine.sampling import row_seed
from realsys.models.hf import end_token_ids, untied
from realsys.runtime.progress import tick
from realsys.weights.layouts.boxes import Box

PROMPTS = "packed_prompts"
PostHook = Callable[[Any, SequenceSample], Tensor]


class LocalEngine(Offloadable, PipelinableEngine):
    """What engines over Hugging Face modules and over parts of Megatron's have in common.

    Attributes:
        slot: group of the processes that see the same data; None if this one is alone.
    """

    base_seed: int
    slot: Any

    @abc.abstractmethod
    def whole_module(self) -> nn.Module:
        """Returns a plain Hugging Face module with full weights; collective over the slot."""

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

    def microbatches(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None
    ) -> list[tuple[list[Run], SequenceSample]]:
        """Splits ``input_`` into micro-batches on this engine's device, each with its runs of sequences.

        Equal on all processes of a slot. Other data-parallel ranks may have more or fewer: they synchronise
        only at the end of a step. Where a pass is collective over ranks too, a subclass adds micro-batches
        without runs: repeats that keep ranks in step, whose output is ignored.
        """
        self.require_onloaded("a pass")
        return input_.to(self.device).microbatches(mb_spec or MicroBatchSpec())


class ForwardOnly(PipelinableEngine):
    """Engine that refuses to train. Precedes the engine that it restricts among the bases."""

    trained_by = "fsdp"  # a backend that would train the same model

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
        raise ConfigError(
            "a model with the inference backend can't be trained",
            where=f"{type(self).__name__}.train_batch",
            fix=f"give this role a training backend, e.g. backend={self.trained_by}",
        )


class HFEngine(LocalEngine):
    """Engine over ``model.module``, a causal LM or critic of transformers.

    Its weights may be sharded over the axes of ``model.topology`` and may have adapters.

    Attributes:
        compute_dtype: dtype of whole weights and of the computation; training may hold wider weights.
        adapter_names: with adapters, names in ``held_weights`` of the weights that training changes.
            After one full transfer, a copy of the model stays up to date with these alone.
    """

    def __init__(self, model: Model, adapters: LoRAOptions | None = None) -> None:
        self.module: nn.Module = model.module.eval()
        self.device = torch.device(model.device)
        if self.device.type == "cpu":
            multiply_by_onednn(self.module)
        self.base_seed = model.base_seed
        self.rank = model.rank
        self.ranks = DataParallel.of(model)
        self.everyone = DataParallel(model.groups.copy, model.device)
        self.slot = model.groups.slot  # processes that see the same data; None if alone
        self.adapters = adapters
        self.parameters = dict(self.module.named_parameters())
        self.compute_dtype = next(iter(self.parameters.values())).dtype
        self.adapter_names = lora.trained_names(self.parameters) if adapters else frozenset()
        self._is_plain = adapters is None
        self._packs = can_pack(self.module)
        self._predicts_tokens = self.module.get_output_embeddings() is not None
        self._plain_class = type(self.module)
        self._copy: nn.Module | None = None  # plain copy for generation
        self._old_in_copy: Literal["nothing", "what trains", "all"] = "all"

    @torch.no_grad()
    def eval_batch(
        self,
        input_: SequenceSample,
        *,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        mb_spec: MicroBatchSpec | None = None,
    ) -> dict[str, float]:
        microbatches = self.microbatches(input_, mb_spec)
        means = WeightedMeans(
            self.ranks, microbatch_weights(microbatches, loss_weight_fn), "global"
        )
        for (_, mb), scale in zip(microbatches, means.scales, strict=True):
            means.add(loss_fn(self.run_module(mb), mb), scale)
        return means.result()

    @torch.no_grad()
    def forward(
        self,
        input_: SequenceSample,
        *,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: PostHook | None = None,
    ) -> Tensor:
        by_run: dict[Run, Tensor] = {}
        for runs, mb in self.microbatches(input_, mb_spec):
            output = apply_post_hook(self.run_module(mb), mb, post_hook)
            rows = torch.split(output, list(mb.meta.rows_per_id(INPUT)))
            by_run.update(zip(runs, rows, strict=False))  # a repeat has no runs
        return torch.cat([by_run[run] for run in sorted(by_run)])

    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        """As in the base class; with adapters, writes the merged model and the adapters beside it."""
        self.require_onloaded("save_to_hf")
        weights = untied(self.module, self.module.state_dict())
        also = self._adapter_writer(weights)
        cast = self._cast_to
        save_streamed(
            self.module if cast is None or self.rank else self._without_weights(),
            tokenizer,
            save_dir,
            kinds=lora.kinds(weights, cast),
            weights=lora.merged_weights(weights, self.adapters, dtype=cast),
            writes=self.rank == 0,
            also=also,
        )
        self.everyone.max(0.0)  # all ranks wait until the directory is complete

    @property
    def _cast_to(self) -> torch.dtype | None:
        """Dtype to which whole weights are cast; None if they are held in the compute dtype."""
        held = next(iter(self.parameters.values())).dtype
        return None if self.adapters or held == self.compute_dtype else self.compute_dtype

    def _without_weights(self) -> nn.Module:
        """Returns a plain module of the compute dtype without weights, for its config and saving."""
        nowhere = torch.device("meta")
        return plain_copy(self._plain_class, self.module, nowhere, self.compute_dtype)

    def _adapter_writer(self, weights: Mapping[str, Tensor]) -> Callable[[Path], None] | None:
        if (adapters := self.adapters) is None:
            return None
        tensors = lora.adapter_tensors(weights)
        return lambda folder: lora.save_adapter(folder / lora.FOLDER, tensors, adapters)

    # ---- weights ------------------------------------------------------------------------------

    def whole_module(self) -> nn.Module:
        """Returns a plain module with full weights, adapters merged; collective if they are sharded.

        The module itself if it is plain, else a copy that is refreshed after each change.
        """
        self.require_onloaded("generate")
        if self._is_plain:
            return self.module
        if self._copy is None:
            self._copy = plain_copy(self._plain_class, self.module, self.device, self.compute_dtype)
        if self._old_in_copy != "nothing":
            mine = dict(self._copy.named_parameters())
            few = self._old_in_copy == "what trains"
            for name, weight in lora.merged_weights(
                self.parameters, self.adapters, changed_only=few, dtype=self._cast_to
            ):
                mine[name].data.copy_(weight)
            self._old_in_copy = "nothing"
        return self._copy

    def trained(self) -> None:
        """Marks the generation copy as outdated; called after an update."""
        if self.adapters is None or self._old_in_copy == "all":
            self._old_in_copy = "all"
        else:
            self._old_in_copy = "what trains"

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, Tensor]]]:
        self.require_onloaded("held_weights")
        free_gathered_weights(self.module)
        held = {
            lora.exchange_name(name): [(boxes(x)[-1], local_shard(x))]
            for name, x in self.parameters.items()
        }
        return {name: parts for name, parts in held.items() if parts[0][0].numel}

    def weights_changed(self) -> None:
        free_gathered_weights(self.module)  # gathered weights are outdated
        self._old_in_copy = "all"

    # ---- offload to CPU memory ----------------------------------------------------------------

    def drop_copies(self) -> None:
        self._copy = None
        self._old_in_copy = "all"
        free_gathered_weights(self.module)

    def own_memory(self) -> list[Tensor]:
        """Lists all tensors that this engine keeps between two calls."""
        return [local_shard(x) for x in (*self.parameters.values(), *self.module.buffers())]

    # ---- one pass -----------------------------------------------------------------------------

    def run_module(self, mb: SequenceSample) -> Tensor | Predictions:
        """Returns a language model's predictions, or a critic's values ``[tokens]``."""
        tick()
        if self._packs and self._predicts_tokens:
            return predict_packed(self.module, mb.data[INPUT], mb.meta.seqlens[INPUT])
        if self._packs:
            output = run_packed(self.module, mb.data[INPUT], mb.meta.seqlens[INPUT])
        else:
            lengths = mb.piece_lengths(INPUT)
            input_ids_BT = pad_packed(mb.data[INPUT], lengths)
            logits_BTV = self.module(input_ids=input_ids_BT, use_cache=False).logits
            output = unpad_to_packed(logits_BTV, lengths)
        return Predictions.of_logits(output) if self._predicts_tokens else output.squeeze(-1)


def apply_post_hook(
    output: Tensor | Predictions, mb: SequenceSample, post_hook: PostHook | None
) -> Tensor:
    """Returns the output of one micro-batch as ``PipelinableEngine.forward`` specifies."""
    if post_hook is not None:
        return post_hook(output, mb)
    return output.logits() if isinstance(output, Predictions) else output


def microbatch_weights(
    microbatches: Sequence[tuple[list[Run], SequenceSample]], loss_weight_fn: LossWeightFn
) -> list[float]:
    """Weight of each micro-batch; 0 for a repeat."""
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
    result = generate(
        module,
        asked,
        gconfig,
        eos_token_ids=end_token_ids(tokenizer, getattr(module, "generation_config", None)),
        pad_token_id=tokenizer.pad_token_id or 0,
        row_seeds=torch.tensor(seeds, dtype=torch.int64),
        max_batch=ROWS_OF_GPU if device.type == "cuda" else None,
        max_tokens=_cache_tokens(module, mb_spec, len(asked)),
    )
    rows = list(map(answer_row, asked, result.tokens, result.logprobs))
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
