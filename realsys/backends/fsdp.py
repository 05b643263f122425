"""Training with AdamW, in one process or sharded over the data axis (torch ``fully_shard``).

With one process there is no process group and no wrapper: the module is trained as it is. With
several, each rank holds a shard of every weight and of the optimizer's moments; full weights exist
one layer at a time during compute, and whole only where generation or saving needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import CheckpointError, ConfigError, DataError, InternalError
from realsys.api.model import LossFn, LossWeightFn, Model, ModelBackend
from realsys.api.options import OptimizerOptions
from realsys.api.plain import from_plain
from realsys.backends.engine import HFEngine, weights_of
from realsys.backends.lr_schedule import learning_rate
from realsys.backends.sharding import (
    cpu_copy,
    full_weight,
    local_shard,
    plain_copy,
    shard,
    state_like,
)
from realsys.backends.weighted_means import WeightedMeans
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.models.source import module_of


@dataclass(frozen=True, kw_only=True)
class FSDPBackend(ModelBackend):
    """Makes an ``FSDPEngine``. ``optimizer`` holds fields of ``OptimizerOptions``."""

    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def _initialize(self, model: Model) -> Model:
        topo = model.topology
        if topo.tensor > 1 or topo.pipeline > 1:
            raise ConfigError(
                f"the layout is {topo}, but the fsdp backend has only the data axis",
                where=f"parallel of {model.name}",
                fix=f"use d{topo.world_size}t1p1, or a backend with tensor and pipeline axes",
            )
        if topo.data > 1 and model.groups.data is None:
            raise InternalError(f"{topo} without a process group", where=str(model.name))
        options = from_plain(OptimizerOptions, dict(self.optimizer), where="optimizer")
        model.module = module_of(model)
        model.module = FSDPEngine(model, options)
        return model


class FSDPEngine(HFEngine):
    """Trains ``model.module``. The module given is sharded in place and belongs to the engine."""

    def __init__(self, model: Model, options: OptimizerOptions) -> None:
        super().__init__(model)
        self.module: Any = self.module  # FSDPModule's methods appear on it when sharded
        self.options = options
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 0
        self.is_sharded = model.groups.data is not None
        self._whole_class = type(self.module)  # fully_shard makes it a subclass
        self._replica: nn.Module | None = None
        self._replica_is_old = True
        if self.is_sharded:
            shard(self.module, DeviceMesh.from_group(model.groups.data, self.device.type))
        self.optimizer = _adamw(self.module, options)

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
        microbatches = self.microbatches(input_, mb_spec)
        weights = weights_of(microbatches, loss_weight_fn)
        means = WeightedMeans(self.ranks, weights, token_normalize_scope)
        last = len(microbatches) - 1
        for i, ((_, mb), scale) in enumerate(zip(microbatches, means.scales, strict=True)):
            if self.is_sharded:  # gradients are added up here, and over ranks only at the end
                self.module.set_requires_gradient_sync(i == last)
            output = self.run_module(mb)
            loss = means.add(loss_fn(output, mb), scale)
            torch.autograd.backward(loss if scale else output.sum() * 0.0)
        stats = means.result()
        stats["grad_norm"] = self._step(lr := self._learning_rate(version_steps))
        return {**stats, "lr": lr}

    def _learning_rate(self, version_steps: int) -> float:
        return learning_rate(self.options, step=version_steps, total_steps=self.total_steps)

    def _step(self, lr: float) -> float:
        """Clips, updates, and gives the norm before clipping. A norm that is no number raises."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise DataError(
                f"the gradient's norm is {float(norm)}; the weights were left as they are",
                where="FSDPEngine.train_batch",
                fix="look for extreme rewards or log-probabilities; lower the learning rate",
            )
        if self.options.gradient_clipping:
            clip_grads_with_norm_(parameters, self.options.gradient_clipping, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._replica_is_old = True
        return float(norm)

    # ---- sharded weights ----------------------------------------------------------------------

    def microbatches(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None
    ) -> list[tuple[list[int], SequenceSample]]:
        """As in the base class. Sharded, ranks with fewer add repeats (no indices) of their smallest.

        A pass through sharded layers is a collective: all ranks must make equally many.
        """
        pieces = super().microbatches(input_, mb_spec)
        missing = int(self.ranks.max(len(pieces))) - len(pieces) if self.is_sharded else 0
        smallest = min(pieces, key=lambda piece: sum(piece[1].meta.tokens_per_id()))[1]
        return pieces + [([], smallest)] * missing

    def whole_module(self) -> nn.Module:
        """The module itself, or a plain copy that is refreshed after each update (collective)."""
        if not self.is_sharded:
            return super().whole_module()
        if self._replica is None:
            self._replica = plain_copy(self._whole_class, self.module, self.device)
        if self._replica_is_old:
            whole = dict(self._replica.named_parameters())
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    whole[name].copy_(full_weight(parameter))
            self._replica_is_old = False
        return self._replica

    def whole_state_dict(self) -> Mapping[str, Tensor] | None:
        """Full weights on the CPU of the writing rank, gathered one by one (collective)."""
        if not self.is_sharded:
            return None
        whole = {}
        for name, x in self.module.state_dict().items():
            weight = full_weight(x)
            if self.rank == 0:
                whole[name] = weight.cpu()
        return whole

    # ---- recovery -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's shards: ``weights`` and ``optimizer``, name → tensors."""
        moments = {
            name: {k: cpu_copy(x) for k, x in self.optimizer.state[p].items()}
            for name, p in self.module.named_parameters()
            if p in self.optimizer.state
        }
        weights = {name: cpu_copy(x) for name, x in self.module.state_dict().items()}
        return {"weights": weights, "optimizer": moments}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave on the same rank of the same layout, bit for bit.

        Raises:
            CheckpointError: names or shapes are those of another model or layout.
        """
        weights, moments = state["weights"], state["optimizer"]
        own = {name: local_shard(x) for name, x in self.module.state_dict().items()}
        if own.keys() != weights.keys():
            differing = sorted(own.keys() ^ weights.keys())
            raise _unfit(f"{len(differing)} weights differ in name, e.g. {differing[0]}")
        for name, x in own.items():
            if x.shape != weights[name].shape:
                shapes = f"{tuple(weights[name].shape)}, {tuple(x.shape)} here"
                raise _unfit(f"{name} has shape {shapes}")
            x.copy_(weights[name])
        self.optimizer.state.clear()
        for name, p in self.module.named_parameters():
            if name in moments:
                self.optimizer.state[p] = {k: state_like(p, k, x) for k, x in moments[name].items()}
        self._replica_is_old = True


def _adamw(module: nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """Weight decay pulls matrices only, not norms and biases."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,  # elementwise, so the same bits each time, on CPU and GPU
    )


def _unfit(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where="FSDPEngine.load_state_dict",
        fix="resume with the model and the parallel layout that wrote the checkpoint",
    )
