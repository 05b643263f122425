"""Base of engines over Hugging Face modules: forward, evaluation, generation, saving.

Batches are packed and pass through the module packed, with a group's common prefix computed once
(packed_attention.py). Modules of unsupported families get a rectangle padded on the right, where causal
attention never attends to padding, so no mask is needed. Either way the result doesn't depend on how a
batch is split. Training is in fsdp.py. Modules always stay in evaluation mode: dropout would make a policy
differ from the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from realsys.algorithms.predictions import Predictions
from realsys.api.model import Model
from realsys.api.options import LoRAOptions
from realsys.backends.hf import lora
from realsys.backends.hf.data_parallel import DataParallel
from realsys.backends.hf.loading import save_streamed
from realsys.backends.hf.local_engine import LocalEngine, MicroBatches, UseOutput
from realsys.backends.hf.sharding import boxes, free_gathered_weights, local_shard, plain_copy
from realsys.backends.kernels.cpu_linear import multiply_by_onednn
from realsys.backends.kernels.packed_attention import can_pack, predict_packed, run_packed
from realsys.data.answers_layout import INPUT
from realsys.data.ragged import pad_packed, unpad_to_packed
from realsys.data.sequence_sample import SequenceSample
from realsys.models.hf import untied
from realsys.runtime.progress import tick
from realsys.weights.layouts.boxes import Box


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

    def _run(self, pieces: MicroBatches, use_output: UseOutput) -> None:
        for i, (_, mb) in enumerate(pieces):
            use_output(self.run_module(mb), i)

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
