"""Computes how many cache tokens fit into a GPU's free memory (pure apart from one query).

For trainers, evaluators and embedded servers without a configured limit. Not for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from realsys.generation.cache_bytes import READ_CELLS, READ_TOKENS_FUSED, BytesOfGeneration

# Of what is free: pieces that the allocator can't join, workspaces of matrix kernels.
_LEFT_FREE = 0.08


def needs_of(config: Any, item: int) -> BytesOfGeneration:
    """Derives the needs of a transformers model, with ``item`` bytes per number."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return BytesOfGeneration.of_sizes(
        layers=config.num_hidden_layers,
        hidden=hidden,
        queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        middle=getattr(config, "intermediate_size", None) or 4 * hidden,
        vocabulary=config.vocab_size,
        item=item,
    )


def tokens_that_fit(free: int, needs: BytesOfGeneration, *, num_rows: int, kept: int = 0) -> int:
    """Returns the number of tokens of all rows together that fit, or 1 if none do.

    Args:
        free: free bytes.
        num_rows: that may be decoded together.
        kept: bytes of these for something else.
    """
    usable = free * (1 - _LEFT_FREE) - kept - needs.logits(num_rows)
    usable -= needs.reading(READ_TOKENS_FUSED, READ_CELLS * READ_TOKENS_FUSED)
    return max(1, int(usable / needs.cached_token))


def room_on_gpu(module: nn.Module, *, num_rows: int, kept: int = 0) -> int:
    """Returns ``tokens_that_fit`` for the module's GPU now."""
    one = next(module.parameters())
    free, _ = torch.cuda.mem_get_info(one.device)
    # torch's allocator keeps freed memory for reuse.
    free += torch.cuda.memory_reserved(one.device) - torch.cuda.memory_allocated(one.device)
    needs = needs_of(module.config, one.element_size())
    return tokens_that_fit(free, needs, num_rows=num_rows, kept=kept)
