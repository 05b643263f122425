"""Linear weights in eight bits: a quarter of float32's memory and of what a step has to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Floats of a block that is converted and used at once: it stays in a core's cache.
_BLOCK_ELEMENTS = 1 << 18
_LARGEST = 127


@dataclass(frozen=True)
class Int8Weight:
    """A matrix ``[N, K]`` as int8, symmetric, with a scale for each of its N outputs."""

    quantized: Tensor  # int8 [N, K]
    scale: Tensor  # float [N]

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """The nearest one; the largest entry of each row is met exactly."""
        scale = weight.abs().amax(dim=1).clamp_(min=torch.finfo(weight.dtype).tiny) / _LARGEST
        quantized = (weight / scale[:, None]).round_().to(torch.int8)
        return cls(quantized, scale)

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T``, in the type of ``x``.

        Block by block into floats: torch's own int8 product (``_weight_int8pack_mm``) is many times slower
        for float32 activations, and rounds them in bfloat16.
        """
        num_outputs, num_inputs = self.quantized.shape
        size = max(64, _BLOCK_ELEMENTS // num_inputs // 64 * 64)
        if size >= num_outputs:
            return F.linear(x, self.quantized.to(x.dtype)).mul_(self.scale)
        out = x.new_empty(len(x), num_outputs)
        for begin in range(0, num_outputs, size):
            block = self.quantized[begin : begin + size].to(x.dtype)
            out[:, begin : begin + size] = F.linear(x, block)
        return out.mul_(self.scale)


def project(
    x: Tensor,
    weight: Tensor | Int8Weight,
    *,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T``, plus ``bias``; or ``add_to``, changed in place by adding it."""
    if isinstance(weight, Int8Weight):
        y = weight.product(x)
        if add_to is not None:
            return add_to.add_(y)
        return y if bias is None else y.add_(bias)
    if add_to is not None:
        return add_to.addmm_(x, weight.t())
    return F.linear(x, weight, bias)
