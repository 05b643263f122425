"""Means over a batch from the means of its micro-batches, on all data-parallel ranks.

A mean of means is wrong if micro-batches differ in length: 10 tokens with loss 1 and 6 with loss 2
have the mean 1.375, not 1.5. So each micro-batch's mean is scaled by its weight, over the weight of all
ranks (``global``) or of its own (``dp``). The loss is multiplied by the same scale before the backward
pass, so that the mean of the gradients over ranks, which FSDP computes, is the gradient of the result.

A loss of several components, each over tokens of its own, has a weight for each: none counts the more
because another one has few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from realsys.api.errors import ConfigError, DataError, did_you_mean
from realsys.backends.hf.data_parallel import DataParallel

_ONLY = "loss"  # the component of a loss that has one


class WeightedMeans:
    """Collects loss and statistics of micro-batches. Collective at construction and at ``result``.

    Attributes:
        scales: one per micro-batch, of its first component, whose means the statistics are; results are the
            mean over ranks of the sum of scale · mean.
    """

    def __init__(
        self,
        ranks: DataParallel,
        weights: Sequence[float | Mapping[str, float]],
        scope: Literal["global", "dp"],
    ) -> None:
        if scope not in ("global", "dp"):
            raise ConfigError(
                f"no token_normalize_scope {scope!r}",
                where="train_batch",
                fix=did_you_mean(scope, ("global", "dp")),
            )
        tables = [w for w in weights if isinstance(w, Mapping)]
        names = tuple(tables[0]) if tables else (_ONLY,)
        parts = {name: [_weight(w, name) for w in weights] for name in names}
        own = [float(sum(part)) for part in parts.values()]
        totals = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        if not max(totals) > 0:
            raise DataError(
                f"the weight of the whole batch is {totals[0]}: no token in it has a loss",
                where="loss_weight_fn of train_batch or eval_batch",
                fix="pass a batch in which at least one token counts",
            )
        self._scales: dict[str, list[float]] = {}
        for (name, part), mine, total in zip(parts.items(), own, totals, strict=True):
            per_weight = ranks.size / (total or 1.0) if scope == "global" else 1.0 / (mine or 1.0)
            self._scales[name] = [float(w) * per_weight for w in part]
        self.scales = self._scales[names[0]]
        self._ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}

    def counts(self, number: int) -> bool:
        """Whether any component of a micro-batch has a weight."""
        return any(scales[number] for scales in self._scales.values())

    def add(self, loss_and_stats: Any, number: int) -> torch.Tensor:
        """Adds what a ``LossFn`` returned of a micro-batch; returns the loss times its scale.

        With scale 0 only the names are recorded: means over nothing are often nan.
        """
        loss, stats = loss_and_stats if isinstance(loss_and_stats, tuple) else (loss_and_stats, {})
        parts = loss if isinstance(loss, Mapping) else {_ONLY: loss}
        scaled = []
        for name, part in parts.items():
            scale = self._scales[name][number]
            self._record("loss", part, scale)
            if len(parts) > 1:
                self._record(f"loss/{name}", part, scale)
            if scale:
                scaled.append(part * scale)
        for name, value in stats.items():
            self._record(name, value, self.scales[number])
        first = next(iter(parts.values()))
        return torch.stack(scaled).sum() if len(scaled) > 1 else (scaled or [first * 0.0])[0]

    def _record(self, name: str, value: torch.Tensor, scale: float) -> None:
        part = value.detach().double() * scale if scale else value.new_zeros(()).double()
        self._sums[name] = self._sums[name] + part if name in self._sums else part

    def result(self) -> dict[str, float]:
        """Returns means by name, equal on all ranks."""
        names = sorted(self._sums)
        sums = self._ranks.sum(torch.stack([self._sums[name] for name in names]))
        return dict(zip(names, (sums / self._ranks.size).tolist(), strict=True))


def _weight(given: float | Mapping[str, float], name: str) -> float:
    """The weight of a component; a number is that of a repeat, or of the only one."""
    return float(given[name] if isinstance(given, Mapping) else given)
