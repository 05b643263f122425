"""Float32 moving averages of weights that compute in half precision.

A copy that follows another by small steps (``ParamReallocHook.eta`` below 1) would not move in half
precision: each step is rounded away. So ``held_weights`` exposes float32 averages; after each weight
movement the compute weights are rounded from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realsys.weights.layouts.boxes import Box

Views = Mapping[str, Sequence[tuple[Box, Tensor]]]


class Averages:
    """Float32 copies of all weights in ``views``, initially exact."""

    def __init__(self, views: Views) -> None:
        self.views: Views = {
            name: [(box, x.to(torch.float32, copy=True)) for box, x in parts]
            for name, parts in views.items()
        }

    def round_into(self, views: Views) -> None:
        """Writes the averages to the compute weights."""
        for name, parts in views.items():
            for (_, x), (_, average) in zip(parts, self.views[name], strict=True):
                x.copy_(average)

    @property
    def memory(self) -> list[Tensor]:
        """All averages."""
        return [x for parts in self.views.values() for _, x in parts]
