"""Forward passes and generation with frozen weights: reference models, and rules without weights.

With only a data axis every rank holds the whole Hugging Face module; with other axes, its part of
Megatron's (realsys.backends.megatron).
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.errors import ConfigError
from realsys.api.model import Model, ModuleSource, ProcessTopology
from realsys.backends.hf.engine import HFEngine
from realsys.backends.hf.loading import HFBackend, module_to_shard
from realsys.backends.hf.local_engine import ForwardOnly
from realsys.backends.hf.lora import add_adapters, with_adapters
from realsys.weights.layouts.boxes import Layout
from realsys.weights.layouts.holdings import megatron_layout, whole_layout


@dataclass(frozen=True, kw_only=True)
class InferenceBackend(HFBackend):
    """Backend that makes an engine without optimizer; a model without module (a rule) gets none."""

    kind = "inference"

    def _initialize(self, model: Model) -> Model:
        if model.module is None:
            return model
        is_cut = _is_cut(model.topology)
        engine = self._engine_of_part(model) if is_cut else self._engine_of_whole(model)
        held = self.held_dtype(model.dtype, trained=False, averaged=model.averaged)
        if self.adapters is None and held != model.dtype:  # adapters are always float32
            engine.keep_averages()
        model.module = engine
        return model

    def _engine_of_whole(self, model: Model) -> ForwardOnly:
        model.module, filling = module_to_shard(model)
        if self.adapters is not None:
            add_adapters(model.module, self.adapters, seed=model.base_seed)
        if filling is not None:
            filling.fill(model.module, model.device)
        model.module.to(model.device)
        model.module.requires_grad_(False)
        return InferenceEngine(model, self.adapters)

    def _engine_of_part(self, model: Model) -> ForwardOnly:
        # Imported here: megatron-core takes seconds, and most copies have only the data axis.
        from realsys.backends.megatron_backend import inference_engine

        if self.adapters is not None:
            raise ConfigError(
                f"the layout is {model.topology}, but adapters have only the data axis here",
                where=f"backend of {model.name}",
                fix=f"use d{model.topology.world_size}t1p1 with lora, or no lora",
            )
        return inference_engine(model)

    def layout(self, source: ModuleSource, topology: ProcessTopology) -> Layout:
        if _is_cut(topology):
            return megatron_layout(source.shape(), topology)
        return with_adapters(source.weights(), self.adapters, topology, whole_layout)


def _is_cut(topo: ProcessTopology) -> bool:
    return topo.tensor > 1 or topo.pipeline > 1


class InferenceEngine(ForwardOnly, HFEngine):
    """Engine with ``forward``, ``eval_batch``, ``generate`` and ``save_to_hf``; can't train."""
