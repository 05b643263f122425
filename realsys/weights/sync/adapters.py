"""Adapters added to the weights that they belong to.

Always to the base weights as they came, never to weights that have adapters in them already: after any
number of versions the result is what one step from the base gives (arXiv:2106.09685, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."  # in the names of peft's files


def adapted(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name of a base weight → names of its A and B."""
    found = set(names)
    pairs = {}
    for name in sorted(found):
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            pairs[layer.removeprefix(_PREFIX) + ".weight"] = (name, layer + _B)
    return pairs


@torch.no_grad()
def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights without adapters: ``W + scale · B · A``, or the same tensor where there are none.

    Worked out in float32 and rounded to the dtype of W once.
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
