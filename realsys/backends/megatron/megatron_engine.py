"""Training engine of a model that is split over the tensor, pipeline and data axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from realsys.api.model import Model
from realsys.api.options import OptimizerOptions
from realsys.backends.hf.local_engine import MicroBatches, TrainingEngine, UseOutput, other_layout
from realsys.backends.megatron.inference_engine import StageEngine
from realsys.backends.megatron.optimizer import StageOptimizer
from realsys.backends.megatron.part import Part


class MegatronEngine(TrainingEngine, StageEngine):
    """Trains this process's part with AdamW; StageOptimizer describes what is sharded."""

    def __init__(
        self,
        model: Model,
        part: Part,
        options: OptimizerOptions,
        *,
        distributed_optimizer: bool,
        grads_in_float32: bool,
    ) -> None:
        super().__init__(model, part)
        self.options = options
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 0
        self.module.requires_grad_(True)
        with self.groups.active():
            self.optimizer = StageOptimizer(
                part.stage,
                part.groups,
                options,
                distributed=distributed_optimizer,
                grads_in_float32=grads_in_float32,
            )

    def _accumulate(self, pieces: MicroBatches, loss: UseOutput) -> None:
        # Gradients are summed over ranks, while the losses' scales assume a mean over them.
        num_ranks = self.ranks.size
        self.optimizer.zero_grad()
        self._run(pieces, lambda x, i: loss(x, i) / num_ranks, trained=self.optimizer.ddp)

    def _step(self, lr: float) -> float:
        with self.groups.active():
            norm = self.optimizer.step(lr)
        self._replica_is_old = True
        return norm

    def weights_changed(self) -> None:
        super().weights_changed()
        with self.groups.active():
            self.optimizer.refresh_masters()

    # ---- recovery -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies this rank's ``weights`` and its shares of the ``optimizer``."""
        self.require_onloaded("state_dict")
        weights = {n: p.detach().to("cpu", copy=True) for n, p in self.module.named_parameters()}
        optimizer = self.optimizer.state_dict()
        return {"weights": weights, "optimizer": optimizer, **self._skipped_state()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores, bit for bit, what ``state_dict`` returned on the same rank of the same topology.

        Raises:
            CheckpointError: names or shapes belong to another model or parallel layout.
        """
        self.require_onloaded("load_state_dict")
        own = dict(self.module.named_parameters())
        saved = {n: tuple(x.shape) for n, x in state["weights"].items()}
        if saved != (here := {n: tuple(p.shape) for n, p in own.items()}):
            differing = sorted(n for n in {*saved, *here} if saved.get(n) != here.get(n))
            first = differing[0]
            raise other_layout(
                self,
                f"{len(differing)} weights differ, e.g. {first}: {saved.get(first)}, "
                f"{here.get(first)} here",
            )
        for name, parameter in own.items():
            parameter.data.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_skipped(state)
        self._replica_is_old = True

    # ---- memory -------------------------------------------------------------------------------

    def own_memory(self) -> list[Tensor]:
        return [*super().own_memory(), *self.optimizer.tensors()]

    def transient_memory(self) -> list[Tensor]:
        return self.optimizer.gradients()
