"""Arguments of the built-in backends, typed: what ``ModelBackendAbstraction.args`` are read into. No torch.

Each backend inherits the class of its arguments; a plan is checked against it (realsys.api.registry).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from realsys.api.options import LoRAOptions, OptimizerOptions


@dataclass(frozen=True, kw_only=True)
class InferenceArguments:
    """Arguments of backend ``inference``.

    Attributes:
        lora: the copy holds base and adapters separately, as the trained model does, so that later only
            adapters need to be transferred.
    """

    lora: LoRAOptions = field(default_factory=LoRAOptions)

    @property
    def adapters(self) -> LoRAOptions | None:
        """The adapters; None if the whole model trains (rank 0)."""
        return self.lora if self.lora.rank else None


@dataclass(frozen=True, kw_only=True)
class FSDPArguments(InferenceArguments):
    """Arguments of backend ``fsdp``.

    Attributes:
        cpu_offload: weights, gradients and moments stay in CPU memory and are copied to the device a
            layer at a time; slower, but moments take no GPU memory.
        recompute: layers keep only their inputs, and recompute the rest in the backward pass.
        lora: with a rank above 0 only adapters train.
    """

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    cpu_offload: bool = False
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class MegatronArguments:
    """Arguments of backend ``megatron``.

    Attributes:
        recompute: recompute activations inside each layer in the backward pass, to save memory.
        sequence_parallel: split norms and residuals over the tensor axis (needs Transformer Engine).
        distributed_optimizer: shard masters and moments over the data axis (ZeRO-1).
        grad_dtype: sum gradients in float32, or in the weights' own dtype (``model``).
    """

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    recompute: bool = False
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    grad_dtype: Literal["float32", "model"] = "float32"
