"""Runs packed sequences through a module of transformers without padding and with shared prefixes once.

Answers to one question share a prefix, for which a causal model computes the same in each, so the prefix
is in the module's input row once; all layers but attention are token-wise. Attention works on sequences
batched in rectangles (packed_pieces.py), where no token attends to the padding after it. transformers lets
a model's attention be replaced by name (``AttentionInterface``), and passes no mask to it.

Shape suffixes: N packed tokens, U those that are computed, B sequences, T the longest of them, H heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from realsys.algorithms.predictions import Predictions
from realsys.backends.kernels.grouped_heads import keys_for
from realsys.backends.kernels.packed_pieces import Pieces, Rectangle
from realsys.data.ragged import rows_at

NAME = "realsys_packed"
# Families whose models pass unknown arguments down to attention, and use a token's neighbours nowhere
# else.
_FAMILIES = ("llama", "qwen2", "qwen3")


def can_pack(module: nn.Module) -> bool:
    """True if the model supports packed rows: a known family in which every layer attends to all tokens."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "model_type", "") in _FAMILIES and all(
        k == "full_attention" for k in kinds
    )


def run_packed(
    module: Any, tokens_N: Tensor, groups: Sequence[Sequence[int]], *, to_the_end: bool = True
) -> Tensor:
    """Computes the module's logits ``[N, …]`` for sequences of these lengths, in groups that may
    share a prefix.

    Args:
        to_the_end: False if the outputs at last tokens are not needed; their rows are then unspecified.
    """
    pieces = Pieces.of(tokens_N, groups, to_the_end=to_the_end)
    logits: Tensor = _computed(module, tokens_N, pieces).logits[0]
    return logits if pieces.place is None else rows_at(logits, pieces.place)


def predict_packed(module: Any, tokens_N: Tensor, groups: Sequence[Sequence[int]]) -> Predictions:
    """Computes a language model's predictions at all tokens but each sequence's last; as ``run_packed``."""
    pieces = Pieces.of(tokens_N, groups, to_the_end=False)
    with _without_head(module):
        states_UH = _computed(module, tokens_N, pieces)[0]
    vocab_size = module.config.vocab_size
    return Predictions(states_UH, module.lm_head, vocab_size=vocab_size, place_N=pieces.place)


def _computed(module: Any, tokens_N: Tensor, pieces: Pieces) -> Any:
    with packed_attention(module.config):
        return module(
            input_ids=(tokens_N if pieces.kept is None else tokens_N[pieces.kept])[None],
            position_ids=pieces.positions,
            use_cache=False,
            pieces=pieces,
        )


@contextmanager
def _without_head(module: Any) -> Iterator[None]:
    """Within the context, the language model returns its last layer's states ``[1, U, H]``.

    Hooks on the module's call still run, such as FSDP's, which gather the head's weight until the
    end of the backward pass.
    """
    module.forward = lambda **inputs: module.model(**inputs).last_hidden_state
    try:
        yield
    finally:
        del module.forward  # removes the instance attribute that shadowed the class's method


@contextmanager
def packed_attention(config: Any, how: str = NAME) -> Iterator[None]:
    """Within the context, the model uses ``attend``; otherwise it generates and is saved with its own."""
    former = config._attn_implementation
    config._attn_implementation = how
    try:
        yield
    finally:
        config._attn_implementation = former


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pieces: Pieces,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence: ``[1, U, H, D]`` from ``[1, H, U, D]``."""
    q_UHD, k_UHD, v_UHD = (x[0].transpose(0, 1) for x in (query, key, value))

    def within(rectangle: Rectangle) -> Tensor:
        def sides(x_UHD: Tensor) -> Tensor:
            rows = x_UHD if rectangle.tokens is None else rows_at(x_UHD, rectangle.tokens)
            shape = (rectangle.num, rectangle.width)
            return rows.unflatten(0, shape).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]

        q_BHTD = sides(q_UHD)
        k_BHTD, v_BHTD, shared = keys_for(q_BHTD, sides(k_UHD), sides(v_UHD))
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD,
            dropout_p=dropout,
            scale=scaling,
            is_causal=True,
            enable_gqa=shared,
        )
        y = y_BHTD.transpose(1, 2).flatten(0, 1)
        return y if rectangle.own is None else rows_at(y, rectangle.own)

    parts = [within(rectangle) for rectangle in pieces.rectangles]
    y_UHD = parts[0] if len(parts) == 1 else torch.cat(parts)
    if pieces.back is not None:
        y_UHD = rows_at(y_UHD, pieces.back)
    return y_UHD[None], None


AttentionInterface.register(NAME, attend)
