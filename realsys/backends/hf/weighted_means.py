"""Means over a batch from the means of its micro-batches, on all data-parallel ranks.

A mean of means is wrong if micro-batches differ in length: 10 tokens with loss 1 and 6 with loss 2
have the mean 1.375, not 1.5. So each micro-batch's mean is scaled by its weight, over the weight of all
ranks (``global``) or of its own (``dp``). The loss is multiplied by the same scale before the backward
pass, so that the mean of the gradients over ranks, which FSDP computes, is the gradient of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from realsys.api.errors import ConfigError, DataError, did_you_mean
from realsys.backends.hf.data_parallel import DataParallel


class WeightedMeans:
    """Collects loss and statistics of micro-batches. Collective at construction and at ``result``.

    Attributes:
        scales: one per micro-batch; results are the mean over ranks of the sum of scale · mean.
    """

    def __init__(
        self, ranks: DataParallel, weights: Sequence[float], scope: Literal["global", "dp"]
    ) -> None:
        if scope not in ("global", "dp"):
            raise ConfigError(
                f"no token_normalize_scope {scope!r}",
                where="train_batch",
                fix=did_you_mean(scope, ("global", "dp")),
            )
        own = float(sum(weights))
        total = float(ranks.sum(torch.tensor(own, dtype=torch.float64)))
        if not total > 0:
            raise DataError(
                f"the weight of the whole batch is {total}: no token in it has a loss",
                where="loss_weight_fn of train_batch or eval_batch",
                fix="pass a batch in which at least one token counts",
            )
        per_weight = ranks.size / total if scope == "global" else 1.0 / (own or 1.0)
        self.scales = [float(w) * per_weight for w in weights]
        self._ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, loss_and_stats: Any, number: int) -> torch.Tensor:
        """Adds what a ``LossFn`` returned; of a micro-batch; returns the loss times its scale.

        With scale 0 only the names are recorded: means over nothing are often nan.
        """
        scale = self.scales[number]
        loss, stats = loss_and_stats if isinstance(loss_and_stats, tuple) else (loss_and_stats, {})
        for name, value in {"loss": loss, **stats}.items():
            part = value.detach().double() * scale if scale else value.new_zeros(()).double()
            self._sums[name] = self._sums[name] + part if name in self._sums else part
        scaled: torch.Tensor = loss * scale
        return scaled

    def result(self) -> dict[str, float]:
        """Returns means by name, equal on all ranks."""
        names = sorted(self._sums)
        sums = self._ranks.sum(torch.stack([self._sums[name] for name in names]))
        return dict(zip(names, (sums / self._ranks.size).tolist(), strict=True))
