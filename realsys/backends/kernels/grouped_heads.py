"""Keys and values for grouped-query attention in torch: native if a fused kernel supports it, else
repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keys_for(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Returns (key, value, ``enable_gqa``) for ``scaled_dot_product_attention``; all are ``[B, H,
    T, D]``.

    On a GPU, float32 has one fused kernel, which does not support grouped heads: torch would fall back to
    materialising all scores, ``[B, H, T, T]``. There keys and values are repeated instead.
    """
    heads, groups = query.shape[1], key.shape[1]
    if heads == groups:
        return key, value, False
    if query.is_cuda and query.dtype == torch.float32:
        times = heads // groups
        return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1), False
    return key, value, True
