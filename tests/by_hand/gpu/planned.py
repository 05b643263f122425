"""What the planner says that a training step adds, for a probe to hold against the device's own figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen2Config

from realsys.api.model import ModelInterfaceType, ProcessTopology
from realsys.models.shape import shape_of
from realsys.planner.memory.copy_memory import HeldModel, StepSizes, call_terms


def planned_step_bytes(shape: Mapping[str, Any], length: int, *, recompute: bool) -> float:
    """Of one sequence of ``length`` tokens, nearly all of them an answer, on one process."""
    config = Qwen2Config(**shape)
    held = HeldModel(
        shape=shape_of(config.to_dict(), critic=False),
        dtype="bfloat16",
        trained=True,
        recompute=recompute,
    )
    sizes = StepSizes(sequences=1, prompt_tokens=2, answer_tokens=length - 2)
    terms = call_terms(held, ProcessTopology(), 0, ModelInterfaceType.TRAIN_STEP, sizes)
    return sum(terms.values())
