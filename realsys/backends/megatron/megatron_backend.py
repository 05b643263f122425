"""Backend ``megatron``: models split along the tensor, pipeline and data axes for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from realsys.api.errors import ConfigError
from realsys.api.model import Model, ModelBackend, ModuleSource, ProcessTopology
from realsys.api.options import OptimizerOptions
from realsys.api.plain import from_plain
from realsys.backends.megatron.inference_engine import MegatronInferenceEngine
from realsys.backends.megatron.megatron_engine import MegatronEngine
from realsys.backends.megatron.modules import has_transformer_engine
from realsys.backends.megatron.part import Part
from realsys.weights.layouts.holdings import megatron_layout

if TYPE_CHECKING:
    from realsys.weights.layouts.boxes import Layout


@dataclass(frozen=True, kw_only=True)
class MegatronBackend(ModelBackend):
    """Backend that makes a ``MegatronEngine``. ``optimizer`` holds fields of ``OptimizerOptions``.

    Attributes:
        recompute: recompute activations inside each layer in the backward pass, to save memory.
        sequence_parallel: split norms and residuals over the tensor axis (needs Transformer Engine).
        distributed_optimizer: shard masters and moments over the data axis (ZeRO-1).
        grad_dtype: sum gradients in float32, or in the weights' own dtype (``model``).
    """

    optimizer: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = False
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    grad_dtype: Literal["float32", "model"] = "float32"

    def __post_init__(self) -> None:
        if self.grad_dtype not in ("float32", "model"):
            raise ConfigError(
                f"grad_dtype is {self.grad_dtype!r}",
                where="arguments of the megatron backend",
                fix='use "float32" or "model"',
            )

    def _initialize(self, model: Model) -> Model:
        if self.sequence_parallel and not has_transformer_engine(model.device):
            raise ConfigError(
                "sequence_parallel needs Transformer Engine, which is not installed",
                where=f"backend of {model.name}",
                fix="turn sequence_parallel off, or install transformer_engine on machines with GPUs",
            )
        part = Part.of(model, recompute=self.recompute, sequence_parallel=self.sequence_parallel)
        options = from_plain(OptimizerOptions, dict(self.optimizer), where="optimizer")
        model.module = MegatronEngine(
            model,
            part,
            options,
            distributed_optimizer=self.distributed_optimizer,
            grads_in_float32=self.grad_dtype == "float32",
        )
        return model

    def layout(self, source: ModuleSource, topology: ProcessTopology) -> Layout:
        return megatron_layout(source.shape(), topology)


def inference_engine(model: Model) -> MegatronInferenceEngine:
    """Makes an engine for ``model`` that only runs forward, in any topology."""
    return MegatronInferenceEngine(model, Part.of(model))
