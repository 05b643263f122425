"""AdamW over the parameters of a stage, sharded over the data axis (ZeRO-1), with float32 masters.

Built from Megatron's classes with explicit process and parameter groups: its factory uses collectives over
the whole world, of which only some processes hold this model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import Adam
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from realsys.api.errors import CheckpointError
from realsys.api.options import OptimizerOptions
from realsys.backends.megatron import compat
from realsys.backends.megatron.megatron_groups import MegatronGroups


class StageOptimizer:
    """Gradients and updates of one stage. All methods must be called with the groups active.

    Attributes:
        ddp: the wrapped stage; gradients are summed in its buffers, in float32 by default.
    """

    def __init__(
        self,
        stage: nn.Module,
        groups: MegatronGroups,
        options: OptimizerOptions,
        *,
        distributed: bool,
        grads_in_float32: bool,
    ) -> None:
        compat.prepare_parameters(stage)
        self.options = options
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=grads_in_float32, use_distributed_optimizer=distributed
        )
        config: Any = stage.config
        self.ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=stage)
        config.finalize_model_grads_func = _finish_gradients
        self._optimizer = _make(self.ddp, groups, options, config, distributed)

    def zero_grad(self) -> None:
        """Zeroes the gradients."""
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, lr: float) -> float:
        """Clips gradients, updates weights and returns the norm before clipping, equal on all ranks
        of the copy. If it is not finite, nothing is updated.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        if self.options.gradient_clipping:
            parameters = self._optimizer.get_parameters()
            clip_grads_with_norm_(parameters, self.options.gradient_clipping, torch.tensor(norm))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step_with_ready_grads()
        return norm

    def refresh_masters(self) -> None:
        """Copies the weights, which were changed from outside, to the float32 masters."""
        self._optimizer.reload_model_params()

    # ---- recovery -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments of this rank's share, in an order fixed by the topology."""
        inner = self._optimizer.optimizer
        parameters = self._optimizer.get_parameters()
        return {
            "masters": {str(i): _copy(p) for i, p in enumerate(parameters)},
            "moments": {
                str(i): {k: _copy(x) for k, x in inner.state[p].items()}
                for i, p in enumerate(parameters)
                if p in inner.state
            },
            "steps": {str(i): g["step"] for i, g in enumerate(inner.param_groups) if "step" in g},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned; the weights must already be loaded.

        Raises:
            CheckpointError: shapes belong to another model or parallel layout.
        """
        inner = self._optimizer.optimizer
        parameters = self._optimizer.get_parameters()
        shapes = {str(i): tuple(p.shape) for i, p in enumerate(parameters)}
        if (saved := {k: tuple(x.shape) for k, x in state["masters"].items()}) != shapes:
            raise CheckpointError(
                f"the optimizer's {len(saved)} shards differ from the {len(shapes)} here in shape",
                where="MegatronEngine.load_state_dict",
                fix="resume with the model and the parallel layout that wrote the checkpoint",
            )
        inner.state.clear()
        for i, parameter in enumerate(parameters):
            parameter.data.copy_(state["masters"][str(i)])
            if moments := state["moments"].get(str(i)):
                inner.state[parameter] = {
                    k: x.to("cpu" if k == "step" else parameter.device, copy=True)
                    if isinstance(x, Tensor)
                    else x
                    for k, x in moments.items()
                }
        for i, step in state["steps"].items():
            inner.param_groups[int(i)]["step"] = step

    # ---- memory -------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """Tensors that must be kept between two steps: masters, moments."""
        inner = self._optimizer.optimizer
        parameters = self._optimizer.get_parameters()
        moments = [
            x for p in parameters for x in inner.state.get(p, {}).values() if isinstance(x, Tensor)
        ]
        return [*(p.data for p in parameters), *moments]

    def gradients(self) -> list[Tensor]:
        """Gradient buffers, which a step begins by zeroing."""
        return [buffer.grad_data for buffer in self.ddp.buffers]


def _make(
    ddp: DistributedDataParallel,
    groups: MegatronGroups,
    options: OptimizerOptions,
    config: Any,
    distributed: bool,
) -> Any:
    settings = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=options.weight_decay,
        clip_grad=0.0,  # done in ``step``, after checking the norm
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    trained = [p for p in ddp.parameters() if p.requires_grad]
    param_groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kind = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    fused = {"fused": True} if Adam is torch.optim.AdamW or Adam is torch.optim.Adam else {}
    make_adamw = torch.optim.AdamW if fused else functools.partial(Adam, adam_w_mode=True)
    adamw = make_adamw(
        [{**group, **kind} for group in param_groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        **fused,
    )
    if distributed:
        with torch.no_grad():  # its shards of float32 weights are views; this detaches them
            optimizer: Any = DistributedOptimizer(
                adamw,
                settings,
                None,
                None,
                model_chunks=[ddp],
                per_model_buffers={0: ddp.buffers},
                data_parallel_group=groups.data,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=groups.slot.rank(),
                distributed_optimizer_instance_id=0,
            )
    elif config.bf16:
        optimizer = Float16OptimizerWithFloat16Params(adamw, settings, None, None)
    else:
        optimizer = FP32Optimizer(adamw, settings, None)
    optimizer.grad_stats_parallel_group = groups.copy if distributed else groups.slot
    optimizer.tp_group = groups.tensor
    return optimizer


def _finish_gradients(model: Any, num_tokens: Any, **settings: Any) -> None:
    """Sums gradients over the data axis without dividing: losses are already scaled."""
    del num_tokens
    finalize_model_grads(model, None, **settings)


def _copy(x: Any) -> Any:
    return x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x
