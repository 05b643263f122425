"""Refuses tensors that would silently broadcast: ``[N]`` against ``[N, 1]`` is ``[N, N]``."""

from __future__ import annotations

import torch

from realsys.api.errors import DataError


def require_same_shape(where: str, **tensors: torch.Tensor) -> None:
    """Raises DataError naming the first tensor that differs in shape from the first one."""
    (name, first), *others = tensors.items()
    for other, x in others:
        if x.shape != first.shape:
            raise DataError(
                f"{other} has shape {tuple(x.shape)}, {name} {tuple(first.shape)}",
                where=where,
                fix="pass tensors of one shape; nothing is broadcast here",
            )
