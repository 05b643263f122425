"""Attention over packed sequences, so that a module of transformers computes nothing on padding.

All other layers look at tokens one by one: they get the packed row ``[1, N, …]`` as it is. Attention looks
at sequences: those of about one length are put side by side in a rectangle padded on the right, where
causal attention never looks from a token to the padding behind it. transformers lets a model's attention
be replaced by name (``AttentionInterface``); one without a mask of its own gets none.

Shape suffixes: N tokens, B sequences, T the longest of them, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "realsys_packed"
# Families whose models hand what they do not know down to their attention, and have no other use of a
# token's neighbours.
_FAMILIES = ("llama", "qwen2", "qwen3")
_SHORT = 16  # all sequences up to so long are put together
_AS_LONG = 0.8  # as the longest of its rectangle a sequence must be, else it goes into the next


@dataclass(frozen=True)
class Rectangle:
    """Some of the sequences, side by side.

    Attributes:
        num, width: B, T.
        tokens: int64 ``[B * T]``, which packed token stands where; the last one of a sequence also stands
            on its padding.
        own: int64, the places that are not padding, in order.
    """

    num: int
    width: int
    tokens: Tensor
    own: Tensor


@dataclass(frozen=True)
class Pieces:
    """Where the sequences of a packed row begin and end, for ``attend``.

    Attributes:
        positions: int64 ``[1, N]``, each token's place in its sequence.
        rectangles: hold all sequences; None: they are of one length, and the row is a rectangle itself.
        back: int64 ``[N]``, for each token its place among the rectangles' own tokens.
    """

    positions: Tensor
    num: int
    rectangles: tuple[Rectangle, ...] | None
    back: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Pieces:
        """Of sequences of these lengths."""
        starts = [0, *accumulate(lengths)][:-1]
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        if len(set(lengths)) == 1:
            return cls(positions, len(lengths), None, None)
        made = [_rectangle([(starts[i], lengths[i]) for i in group]) for group in groups(lengths)]
        order = torch.cat([r.tokens[r.own] for r in made])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        there = [Rectangle(r.num, r.width, r.tokens.to(device), r.own.to(device)) for r in made]
        return cls(positions, len(lengths), tuple(there), back.to(device))


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences that share a rectangle, longest first; empty ones are in none (pure)."""
    found: list[list[int]] = []
    filled = [i for i, length in enumerate(lengths) if length]
    for i in sorted(filled, key=lambda i: -lengths[i]):
        longest = lengths[found[-1][0]] if found else 0
        if found and (lengths[i] >= _AS_LONG * longest or longest <= _SHORT):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _rectangle(pieces: Sequence[tuple[int, int]]) -> Rectangle:
    begins, lengths = (torch.tensor(column)[:, None] for column in zip(*pieces, strict=True))
    width = int(lengths.max())
    place = torch.arange(width)[None]
    tokens_BT = begins + torch.minimum(place, lengths - 1)
    own = (place < lengths).flatten().nonzero().flatten()
    return Rectangle(len(pieces), width, tokens_BT.flatten(), own)


def can_pack(module: nn.Module) -> bool:
    """Whether this model can be given packed rows: a known family, every layer of which sees all tokens."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "model_type", "") in _FAMILIES and all(
        k == "full_attention" for k in kinds
    )


def run_packed(module: Any, tokens_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """The module's logits ``[N, …]`` for packed sequences."""
    pieces = Pieces.of(lengths, tokens_N.device)
    with _attending_so(module.config):
        output = module(
            input_ids=tokens_N[None],
            position_ids=pieces.positions,
            use_cache=False,
            pieces=pieces,
        )
    logits: Tensor = output.logits
    return logits[0]


@contextmanager
def _attending_so(config: Any) -> Iterator[None]:
    """The model's attention is ``attend`` meanwhile; it generates and is saved with its own."""
    former = config._attn_implementation
    config._attn_implementation = NAME
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
    """Causal attention within each sequence: ``[1, N, H, D]`` from ``[1, H, N, D]``."""
    q_NHD, k_NHD, v_NHD = (x[0].transpose(0, 1) for x in (query, key, value))

    def rectangular(tokens: Tensor | None, num: int, width: int) -> Tensor:
        def sides(x_NHD: Tensor) -> Tensor:
            rows = x_NHD if tokens is None else x_NHD.index_select(0, tokens)
            return rows.unflatten(0, (num, width)).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]

        y_BHTD = F.scaled_dot_product_attention(
            sides(q_NHD),
            sides(k_NHD),
            sides(v_NHD),
            dropout_p=dropout,
            scale=scaling,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return y_BHTD.transpose(1, 2).flatten(0, 1)

    if pieces.rectangles is None:
        return rectangular(None, pieces.num, len(q_NHD) // pieces.num)[None], None
    assert pieces.back is not None
    parts = [
        rectangular(r.tokens, r.num, r.width).index_select(0, r.own) for r in pieces.rectangles
    ]
    return torch.cat(parts).index_select(0, pieces.back)[None], None


AttentionInterface.register(NAME, attend)
