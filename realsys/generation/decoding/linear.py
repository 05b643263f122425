"""Linear layers' weights in the formats that a decoder multiplies with.

*plain*: the tensor itself. *packed*: a copy in the order in which oneDNN's kernels read it; on a CPU in
float32 twice as quick for a few rows of a large matrix, because the other product (MKL) puts the
weights in order again at each call. *quantized*: int8 or fp8 (four bits of exponent, three of mantissa),
a quarter of the memory of float32; fp8 rounds small entries finer and large ones coarser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Smaller ones stay in a cache and gain nothing from being packed.
_PACKED_ELEMENTS = 1 << 17
_ALIGNMENT = 64  # bytes; from elsewhere kernels may sum in another order
# Floats of a block that is converted and used at once: it stays in a core's cache.
_BLOCK_ELEMENTS = 1 << 18
Kind = Literal["int8", "fp8"]
_TYPES: dict[Kind, tuple[torch.dtype, float]] = {  # and the largest number that it has
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}


class Linear(Protocol):
    """A weight matrix ``[N, K]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Computes ``x @ weight.T`` for ``x`` ``[M, K]``, plus the bias if there is one."""

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        """Returns ``to`` plus the product; ``to`` may be modified."""


@dataclass(frozen=True)
class Plain:
    """The unmodified weight."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        return to.addmm_(x, self.weight.t()) if self.bias is None else to.add_(self(x))


@dataclass(frozen=True)
class Packed:
    """A reordered copy, for float32 on a CPU.

    Made and read by operators that torch's compiler uses for frozen weights; they have no public name.
    """

    weight: Tensor  # opaque
    bias: Tensor | None = None

    @classmethod
    def can_hold(cls, weight: Tensor) -> bool:
        """True if this machine and torch version support it."""
        right = weight.device.type == "cpu" and weight.dtype == torch.float32
        return right and onednn() is not None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Packed:
        """Makes a packed copy of ``weight``."""
        return cls(onednn()._reorder_linear_weight(weight.contiguous()), bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = onednn()._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        y: Tensor = onednn()._linear_pointwise.binary(x, to, self.weight, self.bias, "add")
        return y


def onednn() -> Any:
    """Returns torch's oneDNN operators for linear layers, or None if this torch lacks them."""
    if not torch._C._has_mkldnn:
        return None
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.ops.mkldnn if all(hasattr(torch.ops.mkldnn, name) for name in names) else None


@dataclass(frozen=True)
class Quantized:
    """Symmetric quantization with a scale per output; computed in the dtype of ``x``."""

    quantized: Tensor  # int8 or float8_e4m3fn, [N, K]
    scale: Tensor  # float [N]
    bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, kind: Kind) -> Quantized:
        """Quantizes to the nearest values; the largest entry of each row is exact."""
        dtype, largest = _TYPES[kind]
        scale = weight.abs().amax(dim=1).clamp_(min=torch.finfo(weight.dtype).tiny) / largest
        scaled = (weight / scale[:, None]).clamp_(-largest, largest)
        return cls((scaled if dtype.is_floating_point else scaled.round_()).to(dtype), scale, bias)

    def __call__(self, x: Tensor) -> Tensor:
        # Block by block into floats: torch's own product (_weight_int8pack_mm) is many times slower
        # for float32 activations, and rounds them otherwise.
        num_outputs, num_inputs = self.quantized.shape
        size = max(64, _BLOCK_ELEMENTS // num_inputs // 64 * 64)
        y = x.new_empty(len(x), num_outputs)
        for begin in range(0, num_outputs, size):
            block = self.quantized[begin : begin + size].to(x.dtype)
            y[:, begin : begin + size] = F.linear(x, block)
        y.mul_(self.scale)
        return y if self.bias is None else y.add_(self.bias)

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        return to.add_(self(x))


def linear(
    weight: Tensor, bias: Tensor | None = None, *, quantize: Literal["none"] | Kind = "none"
) -> Linear:
    """Chooses the format for size and machine; all but ``Plain`` are copies."""
    if quantize != "none":
        return Quantized.of(weight, bias, quantize)
    if weight.numel() >= _PACKED_ELEMENTS and Packed.can_hold(weight):
        return Packed.of(weight, bias)
    aligned = weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT == 0
    return Plain(weight if aligned else weight.clone(memory_format=torch.contiguous_format), bias)
