"""Computes how many cache tokens fit into a GPU's free memory (pure apart from one query).

For trainers, evaluators and embedded servers without a configured limit. Not for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from realsys.generation.decoding.slots import READ_CELLS, READ_TOKENS_FUSED

# More would make steps longer than they make them fewer, and each has its logits.
ROWS_OF_GPU = 1024
_LEFT_FREE = (
    0.08  # of what is free: pieces that the allocator can't join, workspaces of matrix kernels
)
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class BytesOfGeneration:
    """Memory that generation needs besides the weights, in bytes.

    Attributes:
        token: keys and values of one token.
        row: logits of one row, and what is picked from.
        reading: of the texts that are read in one pass, their own cache included.
        layers: of which one is there twice while the cache grows.
    """

    token: int
    row: int
    reading: int
    layers: int

    @classmethod
    def of(cls, config: Any, item: int) -> BytesOfGeneration:
        """Derives the needs of a transformers model, with ``item`` bytes per number."""
        heads, hidden = config.num_attention_heads, config.hidden_size
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        keys = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        middle = getattr(config, "intermediate_size", None) or 4 * hidden
        token = 2 * config.num_hidden_layers * keys * item
        # At once: three of the hidden state, queries to values twice, the MLP's two and their product.
        work = (3 * hidden + 2 * (heads * head_dim + 2 * keys) + 3 * middle) * item
        return cls(
            token=token,
            row=config.vocab_size * (item + 2 * _FLOAT32),
            reading=READ_TOKENS_FUSED * (work + READ_CELLS * token),
            layers=config.num_hidden_layers,
        )


def tokens_that_fit(free: int, needs: BytesOfGeneration, *, num_rows: int, kept: int = 0) -> int:
    """Returns the number of tokens of all rows together that fit, or 1 if none do.

    Args:
        free: bytes that nobody uses.
        num_rows: that may be decoded together.
        kept: bytes of these for something else.
    """
    usable = free * (1 - _LEFT_FREE) - kept - needs.reading
    usable -= min(num_rows, ROWS_OF_GPU) * needs.row
    return max(1, int(usable / (needs.token * (1 + 1 / needs.layers))))


def room_on_gpu(module: nn.Module, *, num_rows: int, kept: int = 0) -> int:
    """Returns ``tokens_that_fit`` for the module's GPU now."""
    one = next(module.parameters())
    free, _ = torch.cuda.mem_get_info(one.device)
    # torch's allocator keeps what was freed, for the next who asks.
    free += torch.cuda.memory_reserved(one.device) - torch.cuda.memory_allocated(one.device)
    needs = BytesOfGeneration.of(module.config, one.element_size())
    return tokens_that_fit(free, needs, num_rows=num_rows, kept=kept)
