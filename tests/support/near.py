"""Compares what float32 has computed in two ways; the tolerance is relative to the size of what went in.

Two processors add the same numbers in other orders, so results of float32 differ by some units in the last
place *of the largest number that went into them*: an absolute tolerance that fits one processor fails on
the next, and one that is relative to each element fails where large terms have cancelled out.

    assert found == near(expected)       # figures: numbers, lists and mappings of numbers
    assert_near(found, expected)         # tensors, mappings and sequences of tensors

`make other-kernels` runs what compares so once more with the oldest kernels of this processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

REL = 1e-5  # 84 units in the last place of float32; 28 were seen between two processors


def near(expected: Any, *, rel: float = REL, scale: float = 1.0) -> Any:
    """Returns what equals numbers near ``expected``: a number, or a list or mapping of numbers.

    Args:
        scale: size of the numbers that went in, where a figure is smaller than they were: losses and
            statistics are means of numbers of size 1.
    """
    return pytest.approx(expected, rel=rel, abs=rel * scale)


def assert_near(found: Any, expected: Any, *, rel: float = REL, scale: float | None = None) -> None:
    """Asserts that tensors are near the expected ones, and of their shapes and dtypes.

    Args:
        found, expected: a tensor or number, or a mapping or sequence of them.
        scale: size of the numbers that went in; None: the largest of all elements expected, so that
            zeros have to be zeros.
    """
    if scale is None:
        scale = max((float(x.abs().max()) for x in _tensors(expected) if x.numel()), default=0.0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=rel * scale)


def _tensors(expected: Any) -> Iterator[torch.Tensor]:
    if isinstance(expected, torch.Tensor | float):
        yield torch.as_tensor(expected).detach()
    else:
        for item in expected.values() if isinstance(expected, Mapping) else expected:
            yield from _tensors(item)
