"""Ours in float64 for the comparison, by letting ``Tensor.float`` be ``Tensor.double`` meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

_FLOAT = torch.Tensor.float


def wide() -> AbstractContextManager[None]:
    """Meanwhile code that says ``.float()`` computes in float64."""
    return _float_is(torch.Tensor.double)


def narrow() -> AbstractContextManager[None]:
    """Inside of ``wide``: as it is used, for code that looks at the bits of a float32."""
    return _float_is(_FLOAT)


@contextmanager
def _float_is(method: Callable[..., Tensor]) -> Iterator[None]:
    before = torch.Tensor.float
    torch.Tensor.float = method  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = before  # type: ignore[method-assign]
