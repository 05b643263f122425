"""Stages new weights beside those in use: verified and converted first, then copied at once.

``stage`` runs while the engine decodes; ``switch`` between two of its steps. ``stage`` rejects
weights that do
not fit, before anything is changed. If a GPU has no memory for a second copy, new weights stay in
host memory, and ``switch`` copies them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from realsys.api.errors import DataError
from realsys.runtime.progress import tick


@dataclass(frozen=True)
class StagedWeights:
    """Parameters of the module and what they are to become: same shape; type and device too unless they
    wait where they came."""

    pairs: tuple[tuple[Tensor, Tensor], ...]

    @property
    def num_bytes(self) -> int:
        """Size of all staged weights in bytes."""
        return sum(new.numel() * new.element_size() for _, new in self.pairs)

    def switch(self) -> None:
        """Copies the staged weights in place."""
        with torch.no_grad():
            for parameter, new in self.pairs:
                parameter.copy_(new)
                tick()


def stage(
    module: nn.Module, weights: Mapping[str, Tensor], *, where: str, wait_there: bool = False
) -> StagedWeights:
    """Prepares ``weights`` (Hugging Face names) for ``module``.

    Args:
        wait_there: they stay where and as they are until the switch.
    Raises:
        DataError: a parameter is missing, a name is unknown, or a shape is another; names them.
    """
    parameters = dict(module.named_parameters())
    known = set(module.state_dict())  # with the second name of a tied weight
    problems = [f"{name} is missing" for name in parameters if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in known]
    problems += [
        f"{name} has shape {list(weights[name].shape)}, the model's is {list(p.shape)}"
        for name, p in parameters.items()
        if name in weights and weights[name].shape != p.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(
            "the weights do not fit the model: " + "; ".join(problems[:3]) + more,
            where=where,
            fix="give weights of the model that this server was started with",
        )
    pairs = []
    for name, parameter in parameters.items():
        new = weights[name]
        pairs.append((parameter, new if wait_there else new.to(parameter.device, parameter.dtype)))
        tick()
    return StagedWeights(tuple(pairs))
