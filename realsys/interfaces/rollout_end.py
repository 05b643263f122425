"""Ends a step whose rollouts train nothing: their texts and tensors are already in the trial's folder."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.data.sequence_sample import SequenceSample


@dataclass(frozen=True, kw_only=True)
class RolloutEndInterface(ModelInterface):
    """Interface whose ``inference`` discards the batch; needs no module."""

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> None:
        """Accepts the batch, which completes the step."""
