"""Training with AdamW, in one process or sharded over data and tensor axes (torch ``fully_shard``).

With one process there is no process group and no wrapper: the plain module is trained. With several,
each rank holds a shard of every weight and of the optimizer's moments; full weights exist one layer at a
time during compute (all layers of a small model together), and whole only for generation and saving. Linear
layers are first split over the tensor axis and computed split (tensor_parallel.py).

An update at a usual learning rate is smaller than the spacing of half-precision numbers. A model that
computes in half precision is therefore held in float32, with float32 moments and gradient sums, and its
layers are cast when gathered; a single process does so too, as a mesh of one. Adapters are always float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError, ConfigErrors, InternalError
from realsys.api.model import Model, ModuleSource, ProcessTopology
from realsys.api.options import LoRAOptions, OptimizerOptions
from realsys.backends.backend_arguments import FSDPArguments
from realsys.backends.hf.engine import HFEngine
from realsys.backends.hf.loading import HFBackend, WeightFiller, module_to_shard
from realsys.backends.hf.local_engine import MicroBatches, TrainingEngine, UseOutput, other_layout
from realsys.backends.hf.lora import add_adapters, with_adapters
from realsys.backends.hf.recompute import recompute_layers
from realsys.backends.hf.sharding import (
    TENSOR,
    cpu_copy,
    is_cut_over_tensor_axis,
    local_gradient,
    local_shard,
    mesh_of,
    shard,
)
from realsys.backends.hf.tensor_parallel import has_local_gradient, parallelize
from realsys.data.sequence_sample import SequenceSample
from realsys.models.source import source_of
from realsys.weights.layouts.boxes import Layout
from realsys.weights.layouts.holdings import fsdp_layout, layout_problems


@dataclass(frozen=True, kw_only=True)
class FSDPBackend(FSDPArguments, HFBackend):
    """Backend that makes an ``FSDPEngine``."""

    kind = "fsdp"

    def _initialize(self, model: Model) -> Model:
        topo = model.topology
        _check_topology(model)
        if topo.world_size > 1 and model.groups.copy is None:
            raise InternalError(f"{topo} without a process group", where=str(model.name))
        held = self.held_dtype(model.dtype, trained=model.trains, averaged=model.averaged)
        model.module, filling = module_to_shard(model, held)
        if self.adapters is not None:
            add_adapters(model.module, self.adapters, seed=model.base_seed)
        if self.recompute:
            recompute_layers(model.module, where=f"recompute of {model.name}")
        model.module = FSDPEngine(
            model,
            self.optimizer,
            self.adapters,
            cpu_offload=self.cpu_offload,
            compute_dtype=None if held == model.dtype else getattr(torch, model.dtype),
            filling=filling,
        )
        return model

    def layout(self, source: ModuleSource, topology: ProcessTopology) -> Layout:
        return with_adapters(source.weights(), self.adapters, topology, fsdp_layout)


def _check_topology(model: Model) -> None:
    """Raises ConfigError(s) if this model or this backend can't be split in the requested topology."""
    topo, where = model.topology, f"parallel of {model.name}"
    if topo.pipeline > 1:
        raise ConfigError(
            f"the layout is {topo}, but the fsdp backend has no pipeline axis",
            where=where,
            fix=f"use d{topo.data * topo.pipeline}t{topo.tensor}p1, or backend=megatron",
        )
    if topo.tensor > 1:
        shape = source_of(model).shape()  # raises for families that can't be split
        if problems := layout_problems(shape, topo, "fsdp", where=where):
            raise ConfigErrors(problems)


class FSDPEngine(TrainingEngine, HFEngine):
    """Trains ``model.module``. The engine shards the given module in place and owns it.

    Args:
        filling: fills a skeleton's weights after it is sharded.
        compute_dtype: compute dtype, if the module's weights are wider.

    Attributes:
        reduces_at_the_end: gradients are reduced to their ranks once a step and are whole until then.
            If layers are sharded one by one, each micro-batch is reduced: whole ones never exist.
    """

    def __init__(
        self,
        model: Model,
        options: OptimizerOptions,
        adapters: LoRAOptions | None = None,
        *,
        cpu_offload: bool = False,
        compute_dtype: torch.dtype | None = None,
        filling: WeightFiller | None = None,
    ) -> None:
        super().__init__(model, adapters)
        self.module: Any = self.module  # FSDPModule's methods appear on it when sharded
        self.options = options
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 0
        lone_data = cpu_offload or compute_dtype is not None
        self.is_sharded = model.topology.data > 1 or lone_data
        self.reduces_at_the_end = False
        self.compute_dtype = compute_dtype or self.compute_dtype
        self.tensor_group = model.groups.tensor
        mesh = mesh_of(model, lone_data=lone_data)
        if mesh is not None:
            self._is_plain = False
            if self.tensor_group is not None:
                parallelize(self.module, mesh[TENSOR])
            if self.is_sharded:
                self.reduces_at_the_end = shard(
                    self.module,
                    mesh["data"],
                    cpu_offload=cpu_offload,
                    compute_dtype=compute_dtype,
                )
        if filling is not None:
            filling.fill(self.module, "cpu" if cpu_offload else self.device)
        # Otherwise needed here: adapters and frequencies are made on the CPU
        if not self.is_sharded:
            self.module.to(self.device)
        self.parameters = dict(self.module.named_parameters())
        # The optimizer sees this rank's shards as plain parameters that share the sharded ones' memory.
        self._shards = {
            name: nn.Parameter(local_shard(p))
            for name, p in self.parameters.items()
            if p.requires_grad
        }
        self.optimizer = _adamw(self._shards.values(), options)

    def _accumulate(self, pieces: MicroBatches, loss: UseOutput) -> None:
        last = len(pieces) - 1
        for i, (_, mb) in enumerate(pieces):
            if self.reduces_at_the_end:  # gradients are summed locally first, then over ranks
                self.module.set_requires_gradient_sync(i == last)
            torch.autograd.backward(loss(self.run_module(mb), i))

    def _step(self, lr: float) -> float:
        gradients = {}
        for name, x in self._shards.items():
            whole = self.parameters[name]
            if (gradient := local_gradient(whole)) is not None:
                if self.tensor_group is not None and has_local_gradient(name):
                    dist.all_reduce(gradient, group=self.tensor_group)
                gradients[name] = x.grad = gradient
            whole.grad = None
        norm = self._norm(gradients)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            return float(norm)
        if self.options.gradient_clipping:
            # Like torch's clip_grads_with_norm_, which can't mix shards of different meshes.
            factor = (self.options.gradient_clipping / (norm + 1e-6)).clamp(max=1.0)
            every = list(gradients.values())
            torch._foreach_mul_(every, factor.to(every[0].device))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trained()
        return float(norm)

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Returns the norm of the whole gradient, equal on all ranks; each element counts once."""
        if self.everyone.group is None:
            return _norm(list(gradients.values()))
        first = self.tensor_group is None or dist.get_rank(self.tensor_group) == 0
        counted = [
            gradient
            for name, gradient in gradients.items()
            if first or is_cut_over_tensor_axis(self.parameters[name])
        ]
        norm = _norm(counted) if counted else torch.zeros(())
        return self.everyone.sum(norm.double().square()).sqrt().to(norm.dtype)

    # ---- sharded weights ----------------------------------------------------------------------

    def microbatches(self, input_: SequenceSample, mb_spec: MicroBatchSpec | None) -> MicroBatches:
        """As in the base class. If sharded, ranks with fewer add repeats (without runs) of their
        smallest.

        A pass through sharded layers is collective, so all ranks must make the same number.
        """
        pieces = super().microbatches(input_, mb_spec)
        missing = int(self.ranks.max(len(pieces))) - len(pieces) if self.is_sharded else 0
        smallest = min(pieces, key=lambda piece: sum(piece[1].meta.tokens_per_id()))[1]
        return [*pieces, *[([], smallest)] * missing]

    def own_memory(self) -> list[Tensor]:
        moments = (x for state in self.optimizer.state.values() for x in state.values())
        return [*super().own_memory(), *moments]

    # ---- recovery -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies this rank's shards: ``weights`` and ``optimizer``, name → tensors."""
        self.require_onloaded("state_dict")
        moments = {
            name: {k: cpu_copy(x) for k, x in self.optimizer.state[p].items()}
            for name, p in self._shards.items()
            if p in self.optimizer.state
        }
        weights = {name: cpu_copy(x) for name, x in self.module.state_dict().items()}
        return {"weights": weights, "optimizer": moments, **self._skipped_state()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores, bit for bit, what ``state_dict`` returned on the same rank of the same topology.

        Raises:
            CheckpointError: names or shapes belong to another model or parallel layout.
        """
        self.require_onloaded("load_state_dict")
        self._load_skipped(state)
        weights, moments = state["weights"], state["optimizer"]
        own = {name: local_shard(x) for name, x in self.module.state_dict().items()}
        if own.keys() != weights.keys():
            differing = sorted(own.keys() ^ weights.keys())
            raise other_layout(
                self, f"{len(differing)} weights differ in name, e.g. {differing[0]}"
            )
        for name, x in own.items():
            if x.shape != weights[name].shape:
                shapes = f"{tuple(weights[name].shape)}, {tuple(x.shape)} here"
                raise other_layout(self, f"{name} has shape {shapes}")
            x.copy_(weights[name])
        self.optimizer.state.clear()
        for name, p in self._shards.items():
            if name in moments:
                self.optimizer.state[p] = {
                    k: x.to(p.device, copy=True) for k, x in moments[name].items()
                }
        self.weights_changed()


def _adamw(trained: Iterable[nn.Parameter], options: OptimizerOptions) -> torch.optim.AdamW:
    """Makes AdamW with weight decay on matrices only, not on norms and biases."""
    parameters = list(trained)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,  # elementwise, hence deterministic on CPU and GPU
    )


def _norm(tensors: list[Tensor]) -> Tensor:
    """Computes the norm over all tensors like ``get_total_norm``, but never sums in half precision."""
    exact = any(x.dtype == torch.float64 for x in tensors)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64 if exact else torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
