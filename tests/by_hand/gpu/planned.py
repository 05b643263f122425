"""What the planner says that a training step adds, for a probe to hold against the device's own figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import Qwen2Config

from realsys.api.model import ModelInterfaceType, ProcessTopology
from realsys.models.shape import shape_of
from realsys.planner.memory.copy_memory import HeldModel, StepSizes, call_terms, permanent_terms


def planned_step_bytes(
    shape: Mapping[str, Any],
    lengths: Sequence[int],
    *,
    recompute: bool,
    prompt: int = 2,
    group: int = 1,
) -> float:
    """Of one micro-batch on one process, gradients included, which come and go with a step.

    Args:
        lengths: tokens of each sequence, its prompt included; the plan takes their mean.
        prompt: tokens of a prompt.
        group: sequences that share a prompt.
    """
    held = HeldModel(
        shape=shape_of(Qwen2Config(**shape).to_dict(), critic=False),
        dtype="bfloat16",
        trained=True,
        recompute=recompute,
    )
    sizes = StepSizes(
        sequences=len(lengths),
        prompt_tokens=prompt,
        answer_tokens=sum(lengths) // len(lengths) - prompt,
        group_size=group,
    )
    topology = ProcessTopology()
    terms = call_terms(held, topology, 0, ModelInterfaceType.TRAIN_STEP, sizes)
    return sum(terms.values()) + permanent_terms(held, topology, 0, generates=False)["gradients"]
