"""What every engine over a Hugging Face module does: forward, evaluation, generation, saving.

Batches come packed and go through the module so, common beginnings of a group once
(packed_attention.py); through one of an unknown family as a rectangle padded on the right, where causal
attention never looks from a token to the padding behind it: no mask is needed. Either way the result
doesn't depend on how a batch is cut. Training is fsdp.py's. Modules stay in evaluation mode throughout:
dropout would make a policy differ from the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from realsys.api.data import MicroBatchSpec
from realsys.api.model import (
    GenerationHyperparameters,
    LossFn,
    LossWeightFn,
    Model,
    PipelinableEngine,
)
from realsys.api.options import LoRAOptions
from realsys.api.progress import tick
from realsys.backends import lora
from realsys.backends.cpu_linear import multiply_by_onednn
from realsys.backends.data_parallel import DataParallel
from realsys.backends.offload import Parkable
from realsys.backends.packed_attention import can_pack, run_packed
from realsys.backends.sharding import boxes, local_shard, plain_copy, settle
from realsys.backends.slot_generation import generate_dealt
from realsys.backends.weighted_means import WeightedMeans
from realsys.data_plane.answers_layout import INPUT, answer_row, answers_sample
from realsys.data_plane.ragged import pad_packed, unpad_to_packed
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.generation.cache_room import ROWS_OF_GPU, room_on_gpu
from realsys.generation.engine import GenerationResult, generate
from realsys.generation.sampling import row_seed
from realsys.models.answer_ends import end_token_ids
from realsys.models.hf import save_hf
from realsys.param_realloc.boxes import Box

PROMPTS = "packed_prompts"
PostHook = Callable[[Tensor, SequenceSample], Tensor]


class HFEngine(Parkable, PipelinableEngine):
    """An engine over ``model.module``, a causal LM or critic of transformers.

    Its weights may be cut over the axes of ``model.topology`` and may have adapters.

    Attributes:
        adapter_names: with adapters, names in ``held_weights`` of all that training changes. After
            one exchange of everything, a copy of the model is kept up to date with these alone.
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
        self.slot = model.groups.slot  # who sees the same data; None: nobody else
        self.adapters = adapters
        self.parameters = dict(self.module.named_parameters())
        self.adapter_names = lora.trained_names(self.parameters) if adapters else frozenset()
        self._is_plain = adapters is None
        self._packs = can_pack(self.module)
        self._predicts_tokens = self.module.get_output_embeddings() is not None
        self._plain_class = type(self.module)
        self._copy: nn.Module | None = None  # plain, for generation
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
        means = WeightedMeans(self.ranks, weights_of(microbatches, loss_weight_fn), "global")
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
        per_id: list[Tensor] = [torch.empty(0)] * input_.batch_size
        for indices, mb in self.microbatches(input_, mb_spec):
            output = self.run_module(mb)
            if post_hook is not None:
                output = post_hook(output, mb)
            rows = torch.split(output, list(mb.meta.rows_per_id(INPUT)))
            for i, x in zip(indices, rows, strict=False):  # a repeat has no indices
                per_id[i] = x
        return torch.cat(per_id)

    def generate(
        self,
        input_: SequenceSample,
        *,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        mb_spec: MicroBatchSpec | None = None,
        seed: int = 0,
    ) -> SequenceSample:
        """As in the base class. Each process of a slot makes a share of the answers."""
        return answer_prompts(
            self.whole_module(),
            input_,
            tokenizer=tokenizer,
            gconfig=gconfig,
            mb_spec=mb_spec,
            base_seed=self.base_seed ^ seed,
            generate=partial(generate_dealt, group=self.slot) if self.slot else generate,
        )

    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        """As in the base class; with adapters, the merged model, and they beside it."""
        self.must_be_here("save_to_hf")
        weights = self.module.state_dict()
        state = None if self._is_plain else self._gathered(weights)
        also = self._adapter_writer(weights)
        if self.rank == 0:
            save_hf(self.module, tokenizer, save_dir, state_dict=state, also=also)
        self.everyone.max(0.0)  # nobody goes on before the directory is whole

    def _gathered(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights on the CPU of the writing rank, one by one (collective)."""
        whole = {}
        for name, weight in lora.merged_weights(weights, self.adapters):
            if self.rank == 0:
                whole[name] = weight.cpu()
        return whole

    def _adapter_writer(self, weights: Mapping[str, Tensor]) -> Callable[[Path], None] | None:
        if (adapters := self.adapters) is None:
            return None
        tensors = lora.adapter_tensors(weights)
        return lambda folder: lora.save_adapter(folder / lora.FOLDER, tensors, adapters)

    # ---- weights ------------------------------------------------------------------------------

    def whole_module(self) -> nn.Module:
        """A plain module with full weights, adapters merged; collective where they are sharded.

        The module itself where it is such a one, else a copy that is refreshed after each change.
        """
        self.must_be_here("generate")
        if self._is_plain:
            return self.module
        if self._copy is None:
            dtype = next(self.module.parameters()).dtype
            self._copy = plain_copy(self._plain_class, self.module, self.device, dtype)
        if self._old_in_copy != "nothing":
            mine = dict(self._copy.named_parameters())
            few = self._old_in_copy == "what trains"
            for name, weight in lora.merged_weights(
                self.parameters, self.adapters, changed_only=few
            ):
                mine[name].data = weight.to(self.device)
            self._old_in_copy = "nothing"
        return self._copy

    def trained(self) -> None:
        """Told after an update: the copy for generation is behind."""
        if self.adapters is None or self._old_in_copy == "all":
            self._old_in_copy = "all"
        else:
            self._old_in_copy = "what trains"

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, Tensor]]]:
        self.must_be_here("held_weights")
        settle(self.module)
        held = {
            lora.exchange_name(name): [(boxes(x)[-1], local_shard(x))]
            for name, x in self.parameters.items()
        }
        return {name: parts for name, parts in held.items() if parts[0][0].numel}

    def weights_changed(self) -> None:
        settle(self.module)  # what it has gathered is of the old weights
        self._old_in_copy = "all"

    # ---- parked in CPU memory -----------------------------------------------------------------

    def drop_copies(self) -> None:
        self._copy = None
        self._old_in_copy = "all"
        settle(self.module)

    def own_memory(self) -> list[Tensor]:
        """All tensors that this engine keeps between two calls."""
        return [local_shard(x) for x in (*self.parameters.values(), *self.module.buffers())]

    # ---- what sharded engines change ----------------------------------------------------------

    def microbatches(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None
    ) -> list[tuple[list[int], SequenceSample]]:
        """Indices and micro-batches of ``input_`` on this engine's device.

        One without indices is a repeat that only keeps ranks in step: its output counts nowhere.
        """
        self.must_be_here("a pass")
        return input_.to(self.device).microbatches(mb_spec or MicroBatchSpec())

    def run_module(self, mb: SequenceSample) -> Tensor:
        """Logits ``[tokens, vocabulary]`` of a language model, values ``[tokens]`` of a critic.

        The logits of a sequence's last token, which predict nothing that is there, mean nothing.
        """
        tick()
        lengths = mb.piece_lengths(INPUT)
        if self._packs:
            output = run_packed(
                self.module,
                mb.data[INPUT],
                mb.meta.seqlens[INPUT],
                to_the_end=not self._predicts_tokens,
            )
        else:
            input_ids_BT = pad_packed(mb.data[INPUT], lengths)
            logits_BTV = self.module(input_ids=input_ids_BT, use_cache=False).logits
            output = unpad_to_packed(logits_BTV, lengths)
        return output.squeeze(-1) if output.shape[-1] == 1 else output


def weights_of(
    microbatches: Sequence[tuple[list[int], SequenceSample]], loss_weight_fn: LossWeightFn
) -> list[float]:
    """Weight of each micro-batch; a repeat weighs nothing."""
    return [loss_weight_fn(mb) if indices else 0.0 for indices, mb in microbatches]


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
    """What ``PipelinableEngine.generate`` describes, with a plain module of whole weights.

    Args:
        generate: answers rows of prompts as ``generation.engine.generate`` does.
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
    """Tokens to keep of the answers that are decoded together: not a matter of the trainer's micro-batch.

    On a CPU, where a step of few rows costs little more than their share, it is by default.
    """
    if mb_spec is not None and mb_spec.max_cache_tokens is not None:
        return mb_spec.max_cache_tokens
    if next(module.parameters()).is_cuda:
        return room_on_gpu(module, num_rows=num_rows)
    return None if mb_spec is None else mb_spec.max_tokens_per_mb
