"""``grpo-given-cost``: ``grpo-math`` whose trainer sleeps instead of computing.

For a machine with fewer cores than a schedule has processes: servers, rollouts, transfers and weight
updates are real; the trainer represents one on a separate machine. Weights do not change.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from experiments.compose import RLExperiment
from experiments.grpo_math import grpo_math
from experiments.parts.call_placement import RolePlacement
from realsys.algorithms.predictions import Predictions
from realsys.api import registry
from realsys.api.data import MicroBatchSpec
from realsys.api.model import LossFn, LossWeightFn, Model, ModelBackendAbstraction
from realsys.api.options import option
from realsys.backends.fsdp import FSDPBackend, FSDPEngine
from realsys.backends.hf.local_engine import microbatch_weights
from realsys.data.answers_layout import INPUT
from realsys.data.sequence_sample import SequenceSample
from realsys.runtime.progress import tick


class GivenCostEngine(FSDPEngine):
    """Says that all next tokens are equally likely, and takes its time over an update."""

    tokens_per_s = 0.0

    def run_module(self, mb: SequenceSample) -> Predictions:
        """From logits all of which are 0."""
        tick()
        return Predictions.of_logits(
            torch.zeros(len(mb.data[INPUT]), self.module.config.vocab_size)
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
        """Sleeps ``1 / tokens_per_s`` for each token that the loss counts."""
        began_s = time.perf_counter()
        stats = self.eval_batch(
            input_, loss_fn=loss_fn, loss_weight_fn=loss_weight_fn, mb_spec=mb_spec
        )
        weights = microbatch_weights(self.microbatches(input_, mb_spec), loss_weight_fn)
        counted = sum(w for w in weights if isinstance(w, float))
        time.sleep(max(0.0, began_s + counted / self.tokens_per_s - time.perf_counter()))
        self.trained()
        return {**stats, "grad_norm": 0.0, "lr": 0.0}


@dataclass(frozen=True, kw_only=True)
class GivenCostBackend(FSDPBackend):
    """Makes a ``GivenCostEngine``."""

    tokens_per_s: float = 0.0

    def _initialize(self, model: Model) -> Model:
        made = super()._initialize(model)
        made.module.__class__, made.module.tokens_per_s = GivenCostEngine, self.tokens_per_s
        return made


@dataclass(frozen=True, kw_only=True)
class GivenCostExperiment(RLExperiment):
    """``grpo-math`` whose trainer sleeps."""

    train_tokens_per_s: float = option(
        1000.0, "tokens of answers that the trainer takes in a second", gt=0
    )

    def _model(self, role: str) -> RolePlacement:
        made = super()._model(role)
        if role != "actor":
            return made
        args: dict[str, Any] = {**made.backend.args, "tokens_per_s": self.train_tokens_per_s}
        return replace(made, backend=ModelBackendAbstraction("given_cost", args))


registry.register_backend("given_cost", GivenCostBackend)


def grpo_given_cost() -> GivenCostExperiment:
    """With the settings of ``grpo-math``."""
    base = grpo_math()
    return GivenCostExperiment(**{f.name: getattr(base, f.name) for f in fields(base)})


registry.register_experiment("grpo-given-cost", grpo_given_cost)
