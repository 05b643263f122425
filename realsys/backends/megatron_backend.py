"""Backend ``megatron``: models split along the tensor, pipeline and data axes for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from realsys.api.errors import ConfigError
from realsys.api.model import Model, ModelBackend, ModuleSource, ProcessTopology
from realsys.backends.backend_arguments import MegatronArguments
from realsys.backends.megatron.inference_engine import MegatronInferenceEngine
from realsys.backends.megatron.megatron_engine import MegatronEngine
from realsys.backends.megatron.modules import has_transformer_engine
from realsys.backends.megatron.part import Part
from realsys.weights.layouts.holdings import megatron_layout

if TYPE_CHECKING:
    from realsys.weights.layouts.boxes import Layout


@dataclass(frozen=True, kw_only=True)
class MegatronBackend(MegatronArguments, ModelBackend):
    """Backend that makes a ``MegatronEngine``."""

    def _initialize(self, model: Model) -> Model:
        if self.sequence_parallel and not has_transformer_engine(model.device):
            raise ConfigError(
                "sequence_parallel needs Transformer Engine, which is not installed",
                where=f"backend of {model.name}",
                fix="turn sequence_parallel off, or install transformer_engine on machines with GPUs",
            )
        part = Part.of(model, recompute=self.recompute, sequence_parallel=self.sequence_parallel)
        model.module = MegatronEngine(
            model,
            part,
            self.optimizer,
            distributed_optimizer=self.distributed_optimizer,
            grads_in_float32=self.grad_dtype == "float32",
        )
        return model

    def layout(self, source: ModuleSource, topology: ProcessTopology) -> Layout:
        return megatron_layout(source.shape(), topology)


def inference_engine(model: Model) -> MegatronInferenceEngine:
    """Makes an engine for ``model`` that only runs forward, in any topology."""
    return MegatronInferenceEngine(model, Part.of(model))
