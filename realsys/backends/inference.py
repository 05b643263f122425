"""Forward passes and generation with frozen weights: reference models, rules without weights.

Every data-parallel rank holds the whole module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import LossFn, LossWeightFn, Model, ModelBackend
from realsys.backends.engine import HFEngine
from realsys.data_plane.sequence_sample import SequenceSample
from realsys.models.source import module_of


@dataclass(frozen=True, kw_only=True)
class InferenceBackend(ModelBackend):
    """Makes an engine without optimizer. A model without module (a rule) keeps none."""

    def _initialize(self, model: Model) -> Model:
        topo = model.topology
        if topo.tensor > 1 or topo.pipeline > 1:
            raise ConfigError(
                f"the layout is {topo}, but the inference backend has only the data axis",
                where=f"parallel of {model.name}",
                fix=f"use d{topo.world_size}t1p1, or a backend with tensor and pipeline axes",
            )
        if model.module is None:
            return model
        model.module = module_of(model).requires_grad_(False)
        model.module = InferenceEngine(model)
        return model


class InferenceEngine(HFEngine):
    """``forward``, ``eval_batch``, ``generate``, ``save_to_hf``; ``train_batch`` is refused."""

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
        raise ConfigError(
            "a model with the inference backend can't be trained",
            where="InferenceEngine.train_batch",
            fix="give this role a training backend, e.g. backend=fsdp",
        )
