"""Sums and maxima over the data-parallel ranks of a model, which are nothing with one process.

Used by the engines for denominators and statistics and by the interfaces for everything that must
be equal on all ranks. Every rank has to call, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from realsys.api.model import Model


@dataclass(frozen=True)
class DataParallel:
    """The processes that hold one model copy and see different data; ``group`` None is one."""

    group: Any = None
    device: str = "cpu"

    @staticmethod
    def of(model: Model) -> DataParallel:
        """The ranks of ``model``. Backends refuse layouts that have other axes besides data."""
        return DataParallel(model.groups.data, model.device)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x`` over the ranks, equal on all of them; ``x`` is not written to."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, number: float) -> float:
        """Largest ``number`` of any rank."""
        return float(self._reduce(torch.tensor(number, dtype=torch.float64), dist.ReduceOp.MAX))

    def _reduce(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        if self.group is None:
            return x
        reduced = x.detach().clone().to(self.device)  # nccl takes tensors of its device only
        dist.all_reduce(reduced, op=op, group=self.group)
        return reduced
