"""Merges adapters into the weights that they belong to.

Always starts from the received base weights, never from merged ones, so that after any number of versions
the result equals a single merge (arXiv:2106.09685, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."  # prefix of names in peft's files


def adapted(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Maps each adapted base weight to the names of its A and B."""
    found = set(names)
    pairs = {}
    for name in sorted(found):
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            pairs[layer.removeprefix(_PREFIX) + ".weight"] = (name, layer + _B)
    return pairs


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Merges adapters: ``W + scale · B · A``, or the same tensor if a weight has none.

    Computed in float32 and rounded to the dtype of W once.
    """
    pairs = adapted(weights)
    hidden = {name for pair in pairs.values() for name in pair}
    found = {}
    for name, x in weights.items():
        if name in hidden:
            continue
        if name in pairs:
            a, b = (weights[side].float() for side in pairs[name])
            x = (x.float() + (b @ a) * scale).to(x.dtype)
        found[name] = x
    return found
