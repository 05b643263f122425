"""Training engine of a model that is split over the tensor, pipeline and data axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from realsys.algorithms.predictions import Predictions, nothing_of
from realsys.api.data import MicroBatchSpec
from realsys.api.errors import CheckpointError
from realsys.api.model import LossFn, LossWeightFn, Model
from realsys.api.options import OptimizerOptions
from realsys.backends.hf.engine import microbatch_weights
from realsys.backends.hf.lr_schedule import learning_rate
from realsys.backends.hf.weighted_means import WeightedMeans
from realsys.backends.megatron.inference_engine import MegatronInferenceEngine
from realsys.backends.megatron.optimizer import StageOptimizer
from realsys.backends.megatron.part import Part
from realsys.data.sequence_sample import SequenceSample


class MegatronEngine(MegatronInferenceEngine):
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
        pieces = self.microbatches(input_, mb_spec)
        weights = microbatch_weights(pieces, loss_weight_fn)
        means = WeightedMeans(self.ranks, weights, token_normalize_scope)

        def loss(output: Tensor | Predictions, i: int) -> Tensor:
            scale = means.scales[i]
            scaled = means.add(loss_fn(output, pieces[i][1]), scale)
            # Gradients are summed over ranks, while the scales assume a mean over them.
            return scaled / self.ranks.size if scale else nothing_of(output)

        self.optimizer.zero_grad()
        self._run(pieces, loss, trained=self.optimizer.ddp)
        stats = self._metrics(means)
        lr = learning_rate(self.options, step=version_steps, total_steps=self.total_steps)
        with self.groups.active():
            stats["grad_norm"] = self.optimizer.step(lr)
        self._replica_is_old = True
        return {**stats, "lr": lr}

    def weights_changed(self) -> None:
        super().weights_changed()
        with self.groups.active():
            self.optimizer.refresh_masters()

    # ---- recovery -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies this rank's ``weights`` and its shares of the ``optimizer``."""
        self.require_onloaded("state_dict")
        weights = {n: p.detach().to("cpu", copy=True) for n, p in self.module.named_parameters()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

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
            raise CheckpointError(
                f"{len(differing)} weights differ, e.g. {first}: {saved.get(first)}, "
                f"{here.get(first)} here",
                where="MegatronEngine.load_state_dict",
                fix="resume with the model and the parallel layout that wrote the checkpoint",
            )
        for name, parameter in own.items():
            parameter.data.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self._replica_is_old = True

    # ---- memory -------------------------------------------------------------------------------

    def own_memory(self) -> list[Tensor]:
        return [*super().own_memory(), *self.optimizer.tensors()]

    def transient_memory(self) -> list[Tensor]:
        return self.optimizer.gradients()
