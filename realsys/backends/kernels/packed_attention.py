"""Packed sequences through a module of transformers: nothing is computed on padding, and nothing twice.

Answers to one question begin with the same tokens. What a causal model says of those is the same in each,
so they are in the row that the module gets once; all its layers but attention look at tokens one by one.
Attention looks at sequences, put together in rectangles (packed_pieces.py) where it never looks from a
token to the padding behind it. transformers lets a model's attention be replaced by name
(``AttentionInterface``); one without a mask of its own gets none.

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
# Families whose models hand what they do not know down to their attention, and have no other use of a
# token's neighbours.
_FAMILIES = ("llama", "qwen2", "qwen3")


def can_pack(module: nn.Module) -> bool:
    """Whether this model can be given packed rows: a known family, every layer of which sees all tokens."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "model_type", "") in _FAMILIES and all(
        k == "full_attention" for k in kinds
    )


def run_packed(
    module: Any, tokens_N: Tensor, groups: Sequence[Sequence[int]], *, to_the_end: bool = True
) -> Tensor:
    """The module's logits ``[N, …]`` for sequences of these lengths, in groups that may begin alike.

    Args:
        to_the_end: else what follows a sequence's last token is not asked for: its row may be another's.
    """
    pieces = Pieces.of(tokens_N, groups, to_the_end=to_the_end)
    logits: Tensor = _computed(module, tokens_N, pieces).logits[0]
    return logits if pieces.place is None else rows_at(logits, pieces.place)


def predict_packed(module: Any, tokens_N: Tensor, groups: Sequence[Sequence[int]]) -> Predictions:
    """What a language model says after each token but the last one of a sequence; as ``run_packed``."""
    pieces = Pieces.of(tokens_N, groups, to_the_end=False)
    with _without_head(module):
        states_UH = _computed(module, tokens_N, pieces)[0]
    vocab_size = module.config.vocab_size
    return Predictions(states_UH, module.lm_head, vocab_size=vocab_size, place_N=pieces.place)


def _computed(module: Any, tokens_N: Tensor, pieces: Pieces) -> Any:
    with attending(module.config):
        return module(
            input_ids=(tokens_N if pieces.kept is None else tokens_N[pieces.kept])[None],
            position_ids=pieces.positions,
            use_cache=False,
            pieces=pieces,
        )


@contextmanager
def _without_head(module: Any) -> Iterator[None]:
    """A call of the language model ends with its last layer's states ``[1, U, H]`` meanwhile.

    What hangs on calls of the module itself stays, as its shards do: there they gather the head's weight,
    which is whole until the backward pass is over.
    """
    module.forward = lambda **inputs: module.model(**inputs).last_hidden_state
    try:
        yield
    finally:
        del module.forward  # the instance's own, which hid its class's


@contextmanager
def attending(config: Any, how: str = NAME) -> Iterator[None]:
    """The model's attention is ``attend`` meanwhile; it generates and is saved with its own."""
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
    """Causal attention within each sequence: ``[1, U, H, D]`` from ``[1, H, U, D]``."""
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
