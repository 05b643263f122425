"""Float32 averages beside weights of half precision that compute.

A copy that follows another one by small steps (``ParamReallocHook.eta`` below 1) would stand still in half
precision: each step is rounded away. So what others see and write to (``held_weights``) are averages in
float32; after each movement the weights that compute are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realsys.weights.layouts.boxes import Box

Views = Mapping[str, Sequence[tuple[Box, Tensor]]]


class Averages:
    """Of all weights in ``views``, exact copies to begin with."""

    def __init__(self, views: Views) -> None:
        self.views: Views = {
            name: [(box, x.to(torch.float32, copy=True)) for box, x in parts]
            for name, parts in views.items()
        }

    def round_into(self, views: Views) -> None:
        """Writes the averages to the weights that compute."""
        for name, parts in views.items():
            for (_, x), (_, average) in zip(parts, self.views[name], strict=True):
                x.copy_(average)

    @property
    def memory(self) -> list[Tensor]:
        """All of them."""
        return [x for parts in self.views.values() for _, x in parts]
