"""Floating-point operations and bytes of a decoder-only model (pure).

A multiplication and an addition count as two. Counted are matrix products only (arXiv:2001.08361,
section 2.1; arXiv:2104.04473, appendix): 2 a weight and token forward, twice that backward; attention
scores and their use, ``2 · s · q`` each for a token that looks at ``s`` others, half of them on average.
"""

from __future__ import annotations

from realsys.models.shape import ModelShape


def matmul_weights(shape: ModelShape) -> tuple[int, int]:
    """Number of weights by which a token is multiplied: (of one layer, of the head)."""
    hidden = shape.hidden_size
    attention = hidden * (2 * shape.q_size + 2 * shape.kv_size)
    layer = attention + 3 * hidden * shape.intermediate_size
    return layer, hidden * (1 if shape.critic else shape.vocab_size)


def forward_flops(shape: ModelShape, *, tokens: float, length: float) -> float:
    """Operations of a forward pass over ``tokens`` tokens in sequences of ``length`` tokens."""
    layer, head = matmul_weights(shape)
    products = 2.0 * tokens * (shape.num_layers * layer + head)
    scores = 4.0 * tokens * (length / 2) * shape.q_size * shape.num_layers
    return products + scores


def decode_flops(shape: ModelShape, *, sequences: float, length: float) -> float:
    """Operations of decoding one more token for each of ``sequences`` sequences of ``length`` tokens."""
    layer, head = matmul_weights(shape)
    products = 2.0 * sequences * (shape.num_layers * layer + head)
    return products + 4.0 * sequences * length * shape.q_size * shape.num_layers


def cache_bytes_per_token(shape: ModelShape, *, item_bytes: int) -> int:
    """Bytes of keys and values that generation keeps per token."""
    return 2 * shape.num_layers * shape.kv_size * item_bytes
