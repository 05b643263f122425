"""Where rollouts end that nothing trains on: their texts and tensors are in the trial's folder by then."""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.data import MicroBatchSpec
from realsys.api.model import Model, ModelInterface
from realsys.data.sequence_sample import SequenceSample


@dataclass(frozen=True, kw_only=True)
class RolloutEndInterface(ModelInterface):
    """``inference`` makes nothing of them; needs no module."""

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> None:
        """Takes the batch, so that the step is done."""
