"""Measures products of linear layers on one core, forward and backward: torch's (MKL) against oneDNN's.

    python benchmarks/bench_cpu_linear.py

Float32, 4,320 rows, the layers of ``bench_against_trl.py``'s model and one of width 1,024. The two
alternate; the best of 25 counts. *back*: the input's gradient, with the weight read transposed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from realsys.backends.kernels.cpu_linear import onednn_product

ROWS = 4320
SHAPES = [(128, 128), (128, 512), (512, 128), (1024, 1024)]
TURNS = 25


def seconds(product: Callable[[], Tensor]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    product()
    return time.perf_counter() - begin


def main() -> None:
    """A table of GFLOP/s."""
    torch.set_num_threads(1)
    sys.stdout.write("| inputs → outputs | forward: torch | oneDNN | back: torch | oneDNN |\n")
    sys.stdout.write("|---|---:|---:|---:|---:|\n")
    for inputs, outputs in SHAPES:
        x, weight = torch.randn(ROWS, inputs), torch.randn(outputs, inputs)
        dy = torch.randn(ROWS, outputs)
        products: list[Callable[[], Tensor]] = [
            lambda x=x, w=weight: F.linear(x, w),
            lambda x=x, w=weight: onednn_product(x, w),
            lambda dy=dy, w=weight: dy @ w,
            lambda dy=dy, w=weight: onednn_product(dy, w.t()),
        ]
        turns = [[seconds(product) for product in products] for _ in range(TURNS)]
        flops = 2 * ROWS * inputs * outputs
        speeds = " | ".join(
            f"{flops / min(column) / 1e9:.0f}" for column in zip(*turns, strict=True)
        )
        sys.stdout.write(f"| {inputs} → {outputs} | {speeds} |\n")


if __name__ == "__main__":
    main()
