"""Runs a module's linear layers with oneDNN on a CPU.

torch multiplies float32 matrices with MKL, which on AMD cores is an eighth to a quarter slower than oneDNN
for many rows (benchmarks/bench_cpu_linear.py). The weight's gradient, a sum over rows, is as fast with MKL.

Shape suffixes: N rows, K inputs, M outputs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from realsys.generation.decoding.linear import onednn

_MIN_ROWS = 256  # fewer rows gain nothing


def multiply_by_onednn(module: nn.Module) -> None:
    """Makes the linear layers of ``module`` use oneDNN if weights and machine support it.

    Their classes and weights do not change, so wrappers such as LoRA's keep working.
    """
    if onednn() is None:
        return
    for part in module.modules():
        if type(part) is nn.Linear:
            part.forward = MethodType(_forward, part)  # type: ignore[method-assign]


def _forward(part: nn.Linear, x: Tensor) -> Tensor:
    weight, num_rows = part.weight, x.numel() // part.in_features
    cut = isinstance(x, DTensor) or isinstance(weight, DTensor)
    floats = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    if cut or not floats or num_rows < _MIN_ROWS:
        return F.linear(x, weight, part.bias)
    y: Tensor = _Product.apply(x.reshape(num_rows, -1), weight, part.bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """``x_NK @ weight_MK.T + bias_M``."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        return onednn_product(x_NK, weight_MK, bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NM: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NK, weight_MK = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            onednn_product(dy_NM, weight_MK.t()) if for_x else None,
            _over_rows(dy_NM, x_NK) if for_weight else None,
            dy_NM.sum(0) if for_bias else None,
        )


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``F.linear`` of float32 matrices; a transposed weight is read as it is, at no cost."""
    y: Tensor = onednn()._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    return y


def _over_rows(a_NM: Tensor, b_NK: Tensor) -> Tensor:
    """Computes ``a_NM.T @ b_NK``. MKL is faster with the narrower matrix on the left."""
    if a_NM.shape[1] <= b_NK.shape[1]:
        return a_NM.t() @ b_NK
    return (b_NK.t() @ a_NM).t()
