"""The forward pass of generation, for the Llama, Qwen2 and Qwen3 families.

Any number of tokens of any number of rows, each at its own position, against a cache of keys and values:
a prompt read at once, a part of one, or one more token of each row are the same computation. Any other
model, or one of these with something unusual in it, takes a slower way; ``fast_path_obstacle`` says why.

**Batch invariance.** On a CPU, in float32, what comes out for a token depends on the weights and on the
tokens of its row up to it, bit for bit: not on the other rows, their number, their lengths, nor on how
the row's tokens were cut into calls. It rests on what kernels were seen to do (torch 2.13 with MKL, 1 and 2
threads; tests/unit/test_continuous_invariance.py): a row of a matrix product is the same in every
product of at least four rows a thread; zeros at the end of a sum change nothing; a softmax and a norm
look at their own row alone. So rows are padded to ``row_granule()``, queries to four, widths to
``WIDTH_GRANULE``, and keys stand at their position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realsys.generation.int8 import Int8Weight, project

FAST_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

LARGEST_GRANULE = 64
WIDTH_GRANULE = 16  # a cache is looked at in multiples of so many positions
_QUERIES = 4  # fewer rows than this take another matrix kernel, with other last bits
_ALIGNMENT = 64  # bytes; kernels may sum in another order from elsewhere
_ROTATION_BLOCK = 64  # positions whose angles are computed together


def row_granule() -> int:
    """Rows of a batch are padded to a multiple of this: four for each thread."""
    return min(_QUERIES * max(2, torch.get_num_threads()), LARGEST_GRANULE)


def rounded(n: int, granule: int) -> int:
    """The least multiple of ``granule`` that is ``n`` or more."""
    return -(-n // granule) * granule


def fast_path_obstacle(module: nn.Module) -> str | None:
    """Why ``FastForward`` can't compute this model, or None."""
    config: Any = module.config
    # FSDP2 wraps by subclassing, so the class itself may bear another name.
    classes = [cls.__name__ for cls in type(module).__mro__]
    if FAST_FAMILIES.get(getattr(config, "model_type", "")) not in classes:
        return f"model class {classes[0]}"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        return f"rope type {rope_type} depends on the length so far"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "sliding-window attention"
    for name, part in module.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(part) is not nn.Linear:
            return f"{name} is a {type(part).__name__}"
        biased = getattr(part, "bias", None) is not None
        if biased and not name.endswith(("q_proj", "k_proj", "v_proj")):
            return f"bias on {name}"
    return None


class KeyValues:
    """Keys and values of ``num_rows`` rows at ``width`` positions each, of all layers.

    Position = index: a row begins at 0. What has not been written is 0, because the sums run over it
    with weight 0.

    Attributes:
        keys, values: by layer, ``[rows * key heads, width, head size]``.
        tensors: all of them, as ``[rows, key heads, width, head size]``.
        base: int64 ``[rows, key heads]``, index of position 0 when a tensor is seen as ``[-1, head size]``.
    """

    def __init__(self, like: FastForward, num_rows: int, width: int) -> None:
        heads, dim = like.num_kv_heads, like.head_dim
        self.num_rows, self.width = num_rows, width
        size = (num_rows * heads, width, dim)
        zeros = like.embedding.new_zeros
        self.keys = [zeros(size) for _ in like.layers]
        self.values = [zeros(size) for _ in like.layers]
        lanes = torch.arange(size[0], device=like.embedding.device)
        self.base = (lanes * width).view(num_rows, heads)
        shape = (num_rows, heads, width, dim)
        self.tensors = [x.view(shape) for x in (*self.keys, *self.values)]

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)


@dataclass(frozen=True)
class _LayerWeights:
    attn_norm: Tensor
    qkv: Tensor | Int8Weight  # rows: all query heads, then key heads, then value heads
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Tensor | Int8Weight
    mlp_norm: Tensor
    gate_up: Tensor | Int8Weight
    down: Tensor | Int8Weight


class FastForward:
    """Forward passes of a module for which ``fast_path_obstacle`` is None.

    Reads some of the module's weights in place and holds a copy of the fused projections (about three
    quarters of a layer's weights): ``reload`` after they changed. ``int8`` keeps all linear weights
    as copies of a quarter of the size.

    Shape suffixes: B rows, P tokens of a row, N = B * P, H query heads, K key-value heads, G = H / K,
    D head size, T positions.
    """

    def __init__(self, module: nn.Module, *, int8: bool = False) -> None:
        config: Any = module.config
        backbone: Any = module.model
        self.module: Any = module
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim: int = backbone.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self._eps = torch.tensor(self.eps)
        self.scale = 1 / math.sqrt(self.head_dim)
        self.rotary = backbone.rotary_emb
        self.embedding: Tensor = backbone.embed_tokens.weight.data
        self.device = self.embedding.device
        self._int8 = int8
        self._rotation = self.embedding.new_empty(0, 2 * self.head_dim)
        self.reload()

    def reload(self) -> None:
        """Takes the module's weights as they are now."""
        backbone: Any = self.module.model
        self.embedding = backbone.embed_tokens.weight.data
        self.final_norm: Tensor = backbone.norm.weight.data
        self.layers: list[_LayerWeights] = []  # freed first: the copies are most of a model
        self.layers = [self._layer_weights(layer) for layer in backbone.layers]
        self.lm_head = self._linear(self.module.lm_head)

    def _layer_weights(self, layer: Any) -> _LayerWeights:
        attn, mlp = layer.self_attn, layer.mlp
        qkv = (attn.q_proj, attn.k_proj, attn.v_proj)
        biased = attn.q_proj.bias is not None
        normed = hasattr(attn, "q_norm")
        return _LayerWeights(
            attn_norm=layer.input_layernorm.weight.data,
            qkv=self._linear(*qkv),
            qkv_bias=torch.cat([p.bias.data for p in qkv]) if biased else None,
            q_norm=attn.q_norm.weight.data if normed else None,
            k_norm=attn.k_norm.weight.data if normed else None,
            attn_out=self._linear(attn.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.data,
            gate_up=self._linear(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
        )

    def _linear(self, *parts: Any) -> Tensor | Int8Weight:
        weights = [part.weight.data for part in parts]
        weight: Tensor = weights[0] if len(weights) == 1 else torch.cat(weights)
        if self._int8:
            return Int8Weight.of(weight)
        aligned = weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT == 0
        return weight if aligned else weight.clone(memory_format=torch.contiguous_format)

    def padded_length(self, num_rows: int, length: int) -> int:
        """Tokens a row to give ``run`` instead of ``length``, so that the matrices suit its kernels."""
        granule = row_granule()
        return rounded(length, math.lcm(_QUERIES, granule // math.gcd(num_rows, granule)))

    def run(self, tokens_BP: Tensor, positions_BP: Tensor, cache: KeyValues, width: int) -> Tensor:
        """Reads tokens; what the last layer says of each, ``[N, hidden]``.

        Row i goes with the cache's row i. Each token sees the positions up to its own, which must have been
        written, its own keys and values included: they are written here.

        Args:
            tokens_BP: int64; B * P a multiple of the row granule.
            positions_BP: int64, below ``width``, distinct within a row.
            width: how much of the cache is looked at; a multiple of ``WIDTH_GRANULE``.
        """
        num_rows, length = tokens_BP.shape
        rotation = self._rotation_of(width).index_select(0, positions_BP.flatten())[:, None]
        cos, sin = rotation.chunk(2, dim=-1)
        index = (positions_BP[:, :, None] + cache.base[:num_rows, None]).flatten()
        mask = self._mask(positions_BP, width)
        lanes = num_rows * self.num_kv_heads
        x = F.embedding(tokens_BP.flatten(), self.embedding)
        for w, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            y = self._norm(x, w.attn_norm)
            q, k, v = self._queries_keys_values(y, w, cos, sin)
            keys.view(-1, self.head_dim).index_copy_(0, index, k)
            values.view(-1, self.head_dim).index_copy_(0, index, v)
            y = self._attention(
                self._lanes_of(q, length), keys[:lanes, :width], values[:lanes, :width], mask
            )
            project(self._tokens_of(y, num_rows, length), w.attn_out, add_to=x)
            y = self._norm(x, w.mlp_norm)
            gate, up = project(y, w.gate_up).chunk(2, dim=-1)
            project(F.silu(gate).mul_(up), w.down, add_to=x)
        return x

    def logits(self, hidden: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Logits ``[rows, vocabulary]`` after those tokens (indices into N; None: all of them)."""
        num = len(hidden)
        if rows is not None:
            num = len(rows)
            padding = [0] * (rounded(num, row_granule()) - num)
            hidden = hidden[torch.tensor([*rows, *padding], device=hidden.device)]
        last = self._norm(hidden, self.final_norm)
        logits: Tensor = project(last, self.lm_head)
        return logits[:num]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        # torch's own takes more kernels, whose number is what counts for a few rows.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * inverse).mul_(weight)

    def _queries_keys_values(
        self, y: Tensor, w: _LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[N, H, D]`` and, one line a token and head, keys and values ``[N * K, D]``."""
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = project(y, w.qkv, bias=w.qkv_bias).view(len(y), heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._norm(qk[:, :heads], w.q_norm), self._norm(qk[:, heads:], w.k_norm)
            qk = torch.cat([q, k], dim=1)
        halves_swapped = qk.roll(dim // 2, dims=-1)  # sin holds rotate_half's minus
        qk = (qk * cos).addcmul_(halves_swapped, sin)
        return qk[:, :heads], qk[:, heads:].reshape(-1, dim), v.reshape(-1, dim)

    def _lanes_of(self, q_NHD: Tensor, length: int) -> Tensor:
        """Queries by key head: ``[B * K, P * G, D]``, at least ``_QUERIES`` of them.

        The query heads that share a key head see the same keys: they stand in as tokens.
        """
        kv_heads, dim = self.num_kv_heads, self.head_dim
        group = self.num_heads // kv_heads
        if length > 1:
            q_BPKGD = q_NHD.reshape(-1, length, kv_heads, group, dim)
            return q_BPKGD.transpose(1, 2).reshape(-1, length * group, dim)
        q = q_NHD.reshape(-1, group, dim)
        if group >= _QUERIES:
            return q
        padded = q.new_zeros(len(q), _QUERIES, dim)
        padded[:, :group] = q
        return padded

    def _tokens_of(self, y: Tensor, num_rows: int, length: int) -> Tensor:
        """The way back: ``[N, H * D]``."""
        group = self.num_heads // self.num_kv_heads
        if length > 1:
            y = y.view(num_rows, self.num_kv_heads, length, group, -1).transpose(1, 2)
        else:
            y = y[:, :group]
        return y.reshape(num_rows * length, -1)

    def _attention(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        # Two batched products are quicker on a CPU than torch's fused attention for so few queries.
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=self.scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values)

    def _mask(self, positions_BP: Tensor, width: int) -> Tensor:
        """Added to the scores of each query, ``[B * K, P * G, T]``: 0, or -inf for what is later."""
        num_rows, length = positions_BP.shape
        group = self.num_heads // self.num_kv_heads
        queries = group if length > 1 else max(group, _QUERIES)
        later = torch.arange(width, device=self.device) > positions_BP[:, :, None]
        mask = self.embedding.new_zeros(later.shape).masked_fill_(later, -torch.inf)
        shape = (num_rows, self.num_kv_heads, length, queries, width)
        return mask[:, None, :, None].expand(shape).reshape(-1, length * queries, width)

    def _rotation_of(self, width: int) -> Tensor:
        """cos and sin side by side, ``[width or more, 2 D]``; the sin with rotate_half's minus in it.

        Computed in blocks, so that an angle is the same however far the table reaches.
        """
        while len(self._rotation) < width:
            begin = len(self._rotation)
            positions = torch.arange(begin, begin + _ROTATION_BLOCK, device=self.device)
            cos, sin = self.rotary(self.embedding, positions[None])
            half = self.head_dim // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            self._rotation = torch.cat([self._rotation, torch.cat([cos, sin], dim=-1)[0]])
        return self._rotation
