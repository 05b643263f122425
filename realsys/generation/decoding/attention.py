"""Attention over cached keys and values, as products of matrices with few rows.

A *lane* is one row's share of one product: the queries of all query heads that see the same keys stand in
as rows of a matrix. Small matrices take other kernels, with other last bits (decoder.py, batch
invariance). So where a key head has fewer query heads than ``MIN_QUERIES``, or is narrower than
``MIN_WIDTH``, some key heads share a lane: their keys lie side by side, and a query is 0 where it
meets another head's.

In half precision scores are made, masked and turned into weights in float32, as in the fused attention
that trains: a score of 500 is rounded to a multiple of 2 by bfloat16.

Shape suffixes: B rows, P tokens of a row, N = B * P, H query heads, K key heads, C key heads of a lane,
L = K / C lanes, G = H / K, D head size, E = C * D, Q queries of a token in a lane, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_QUERIES = 4  # with fewer rows
MIN_WIDTH = 8  # with fewer than 400 multiplications: rows x columns x terms
# Sums over positions are split into pieces of this size: MKL adds more than 192 terms in another order.
PIECE = 128
_GRANULE = 8  # a cache is attended to in multiples of this many positions
_HALF = (torch.bfloat16, torch.float16)
# Since torch 2.8, for CUDA: products of half-precision matrices with float32 results.
_KEEPS_SUMS = hasattr(torch.ops.aten.bmm, "dtype")


def seen_width(num: int) -> int:
    """Returns the number of positions to attend to if ``num`` are needed."""
    width = num + -num % _GRANULE
    # As a sum of their own, or the last piece of one, eight positions may take the other kernels.
    return width + _GRANULE if width % PIECE == _GRANULE else width


class Lanes:
    """Arrangement of a model's heads in lanes."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, shared: int | None = None
    ) -> None:
        self.group = num_heads // num_kv_heads
        if shared is None:
            needed = max(-(-MIN_QUERIES // self.group), -(-MIN_WIDTH // head_dim))
            divisors = [c for c in range(1, num_kv_heads + 1) if num_kv_heads % c == 0]
            shared = next((c for c in divisors if c >= needed), num_kv_heads)
        self.shared = shared  # C
        self.num_lanes = num_kv_heads // self.shared  # L
        self.head_dim = head_dim
        self.width = self.shared * head_dim  # E
        self.scale = 1 / math.sqrt(head_dim)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # of one token a row, by rows

    def apart(self, parts: int) -> Lanes:
        """Returns lanes of which ``parts`` lie side by side in one of these, for texts."""
        num_kv_heads = self.num_lanes * self.shared
        return Lanes(
            self.group * num_kv_heads, num_kv_heads, self.head_dim, shared=self.shared // parts
        )

    def queries(self, q_NHD: Tensor, length: int) -> Tensor:
        """Returns queries as ``[B * L, P * Q, E]``; valid until the next call."""
        num_rows = len(q_NHD) // length
        lane = (self.num_lanes, self.shared, self.group)
        q_BPLCGD = _split(_split(q_NHD, 0, (num_rows, length)), 2, lane)
        num_queries = self._num_queries(length)
        if self.shared == 1 and num_queries == self.group:
            q_BLPGD = q_BPLCGD[:, :, :, 0].transpose(1, 2)
            q: Tensor = q_BLPGD.reshape(-1, length * num_queries, self.head_dim)
            return q
        buffer, own = self._buffer(q_NHD, num_rows, length)
        own.copy_(q_BPLCGD.permute(0, 2, 1, 4, 5, 3))
        return buffer

    def outputs(self, y: Tensor, length: int) -> Tensor:
        """Converts ``[B * L, P * Q, E]`` back to ``[N, H * D]``."""
        y_BLPGDC = self._own(y, length)
        num_tokens = y_BLPGDC.shape[0] * length
        return y_BLPGDC.permute(0, 2, 1, 5, 3, 4).reshape(num_tokens, -1)

    def mask(self, positions_BP: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Returns what is added to scores: 0, or -inf for later positions. For queries of ``dtype``.

        ``[B * L, P * Q, T]``; for half precision, float32 ``[B, 1, P, 1, T]``.
        """
        num_rows, length = positions_BP.shape
        num_queries = self._num_queries(length)
        later = torch.arange(width, device=positions_BP.device) > positions_BP[:, :, None]
        half = dtype in _HALF
        mask = torch.zeros(later.shape, dtype=torch.float32 if half else dtype, device=later.device)
        mask.masked_fill_(later, -torch.inf)
        if half:
            return mask[:, None, :, None]
        shape = (num_rows, self.num_lanes, length, num_queries, width)
        return mask[:, None, :, None].expand(shape).reshape(-1, length * num_queries, width)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Computes ``[B * L, P * Q, E]`` from keys ``[B * L, E, T]`` and values ``[B * L, T, E]``."""
        if queries.dtype in _HALF:
            return self._attend_half(queries, keys, values, mask)
        # Faster on a CPU than torch's fused attention for few queries.
        scores = torch.baddbmm(mask, queries, keys, alpha=self.scale)
        weights = torch.softmax(scores, dim=-1)
        width = weights.shape[-1]
        if width <= PIECE or weights.device.type != "cpu":
            return torch.bmm(weights, values)
        sums = torch.bmm(weights[:, :, :PIECE], values[:, :PIECE])
        for begin in range(PIECE, width, PIECE):
            piece = slice(begin, begin + PIECE)
            sums.baddbmm_(weights[:, :, piece], values[:, piece])
        return sums

    def _attend_half(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        on_gpu = queries.is_cuda
        if on_gpu and _KEEPS_SUMS:
            products = torch.bmm(queries, keys, out_dtype=torch.float32)
        else:
            products = torch.bmm(queries.float(), keys.float())
        by_row = products.view(len(mask), self.num_lanes, mask.shape[2], -1, products.shape[-1])
        weights = torch.softmax(torch.add(mask, by_row, alpha=self.scale), dim=-1)
        weights = weights.view_as(products)
        if on_gpu:
            return torch.bmm(weights.to(values.dtype), values)
        return torch.bmm(weights, values.float()).to(values.dtype)

    def _num_queries(self, length: int) -> int:
        own = self.shared * self.group
        return own if length > 1 else max(own, MIN_QUERIES)

    def _buffer(self, like: Tensor, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns zeros for queries, and the part of them that queries are written to."""
        if length == 1 and (found := self._buffers.get(num_rows)) is not None:
            return found
        shape = (num_rows * self.num_lanes, length * self._num_queries(length), self.width)
        buffer = like.new_zeros(shape)
        made = buffer, self._own(buffer, length)
        if length == 1:
            self._buffers = {num_rows: made}  # the number of rows changes seldom
        return made

    def _own(self, x: Tensor, length: int) -> Tensor:
        """Returns the blocks where a query meets its own head: a view ``[B, L, P, G, D, C]``."""
        heads, group = self.shared, self.group
        x = x.view(-1, self.num_lanes, length, self._num_queries(length), self.width)
        blocks = _split(x[:, :, :, : heads * group], 3, (heads, group))
        return _split(blocks, 5, (heads, self.head_dim)).diagonal(dim1=3, dim2=5)


def _split(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    split: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split


def attend_texts(
    q_BPHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, seen_BPT: Tensor | None, scale: float
) -> Tensor:
    """Runs torch's fused attention for many tokens per row, ``[B, P, H, D]``, without storing scores.

    Args:
        seen_BPT: bool, positions that a token attends to; None: those up to its own, of texts that
            begin here.
    """
    group = q_BPHD.shape[2] // k_BTKD.shape[2]
    # Of the kernels only flash attention shares key heads; it supports half precision without a mask.
    shares = group > 1 and seen_BPT is None and q_BPHD.dtype in _HALF
    if group > 1 and not shares:
        k_BTKD, v_BTKD = (x.repeat_interleave(group, dim=2) for x in (k_BTKD, v_BTKD))
    y_BHPD: Tensor = F.scaled_dot_product_attention(
        q_BPHD.transpose(1, 2),
        k_BTKD.transpose(1, 2),
        v_BTKD.transpose(1, 2),
        attn_mask=None if seen_BPT is None else seen_BPT[:, None],
        is_causal=seen_BPT is None,
        scale=scale,
        enable_gqa=shares,
    )
    return y_BHPD.transpose(1, 2)


class KeyValues:
    """Keys and values of ``num_rows`` rows at ``width`` positions each, of all layers.

    Position = index: a row begins at 0. Unwritten entries are 0, because sums include them with weight 0.
    Keys are stored transposed, which halves the time of a product with few queries and outweighs the
    slower write.

    Attributes:
        keys: by layer, ``[rows * L, E, width]``.
        values: by layer, ``[rows * L, width, E]``.
        tensors: all of them, seen as ``[rows, L, width, E]``.
    """

    def __init__(
        self, lanes: Lanes, num_layers: int, num_rows: int, width: int, like: Tensor
    ) -> None:
        self.num_rows, self.width, self._lanes = num_rows, width, lanes
        self._like, self._num_layers = like, num_layers
        made = [self._of_a_layer(num_rows, width) for _ in range(num_layers)]
        self.keys = [keys for keys, _ in made]
        self.values = [values for _, values in made]
        self.tensors = [self._seen(x.transpose(1, 2)) for x in self.keys]
        self.tensors += [self._seen(x) for x in self.values]

    def resize(self, num_rows: int, width: int) -> None:
        """Changes the numbers of rows and positions, keeping common content; only one layer is ever
        duplicated.
        """
        rows = min(num_rows, self.num_rows)
        seen = min(width, self.width)
        self.num_rows, self.width = num_rows, width
        for i in range(self._num_layers):
            keys, values = self._of_a_layer(num_rows, width)
            for at, x in ((i, keys.transpose(1, 2)), (self._num_layers + i, values)):
                new = self._seen(x)
                new[:rows, :, :seen] = self.tensors[at][:rows, :, :seen]
                self.tensors[at] = new
            self.keys[i], self.values[i] = keys, values

    def _of_a_layer(self, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        lines = num_rows * self._lanes.num_lanes
        keys = self._like.new_zeros(lines, self._lanes.width, width)
        return keys, self._like.new_zeros(lines, width, self._lanes.width)

    def _seen(self, x: Tensor) -> Tensor:
        return _split(x, 0, (self.num_rows, self._lanes.num_lanes))

    def of_heads(self, layer: int, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the first rows and positions, ``[B, T, K, D]``."""
        lanes, rows = self._lanes, num_rows * self._lanes.num_lanes
        heads = (lanes.shared, lanes.head_dim)
        keys = self.keys[layer][:rows, :, :width].transpose(1, 2)
        both = []
        for x in (keys, self.values[layer][:rows, :width]):
            x_BLTCD = _split(_split(x, 2, heads), 0, (num_rows, lanes.num_lanes))
            both.append(x_BLTCD.transpose(1, 2).flatten(2, 3))
        return both[0], both[1]

    def apart(self, layer: int, parts: int) -> tuple[Tensor, Tensor]:
        """Returns keys ``[rows * L, parts, E / parts, width]`` and values ``[rows * L, width, parts, E /
        parts]``: views.
        """
        sizes = (parts, self._lanes.width // parts)
        return _split(self.keys[layer], 1, sizes), _split(self.values[layer], 2, sizes)

    def places(self, positions_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Computes where in a layer the tokens of the first B rows are stored, for ``write``.

        Indices ``[N * L * E]`` into its keys, and ``[N * L]`` of lines of its values.
        """
        num_lanes, size = self._lanes.num_lanes, self._lanes.width
        device = positions_BP.device
        lane = torch.arange(len(positions_BP) * num_lanes, device=device).view(-1, 1, num_lanes)
        line = lane * (size * self.width) + positions_BP[:, :, None]
        keys = line[..., None] + torch.arange(0, size * self.width, self.width, device=device)
        return keys.flatten(), (lane * self.width + positions_BP[:, :, None]).flatten()

    def write(self, layer: int, places: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Writes keys and values ``[N * L, E]`` of tokens at ``places``."""
        self.keys[layer].view(-1).scatter_(0, places[0], k.flatten())
        self.values[layer].view(-1, self._lanes.width).index_copy_(0, places[1], v)
