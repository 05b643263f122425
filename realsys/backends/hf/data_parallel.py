"""Sums and maxima over the data-parallel ranks of a model; no-ops with one process.

Engines use it for denominators and statistics, interfaces for everything that must be equal on all
ranks. Collective: every rank must call in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from realsys.api.model import Model


@dataclass(frozen=True)
class DataParallel:
    """Processes that hold one model copy and see different data; ``group`` None is a single process."""

    group: Any = None
    device: str = "cpu"

    @staticmethod
    def of(model: Model) -> DataParallel:
        """Returns the data-parallel ranks of ``model``."""
        return DataParallel(model.groups.data, model.device)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sums ``x`` elementwise over the ranks; equal on all of them. ``x`` is not modified."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, number: float) -> float:
        """Returns the largest ``number`` of any rank."""
        return float(self._reduce(torch.tensor(number, dtype=torch.float64), dist.ReduceOp.MAX))

    def _reduce(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        if self.group is None:
            return x
        reduced = x.detach().clone().to(self.device)  # NCCL accepts tensors of its device only
        dist.all_reduce(reduced, op=op, group=self.group)
        return reduced
