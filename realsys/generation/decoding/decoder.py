"""Forward pass of generation for the Llama, Qwen2 and Qwen3 families.

Any number of tokens of any number of rows, each at its own position, against a cache of keys and values:
prefilling a prompt at once or in parts and decoding one more token per row are the same computation. Other
models, or unusual variants of these, use a slower path; ``fast_path_obstacle`` returns why.

**Batch invariance.** On a CPU, in float32, a token's output depends, bit for bit, only on the weights and
the tokens of its row up to it: not on the other rows, their number, their lengths, nor on how the row's
tokens were split into calls. It relies on observed behaviour of kernels (torch 2.13 with MKL, 1 and 2
threads, on Intel's processors with MKL_CBWR=AUTO,STRICT, see realsys/worker/environment.py;
tests/unit/generation/test_continuous_invariance.py): a row of a matrix product is the same in every
product of at least four rows a thread; zeros at the end of a short sum change nothing; a softmax and a
norm look at their own row alone. So rows are padded to ``row_granule()``, queries to four, widths to
``seen_width``, keys stand at their position, and long sums are made in pieces (attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realsys.generation.decoding.attention import (
    MIN_QUERIES,
    MIN_WIDTH,
    KeyValues,
    Lanes,
    attend_texts,
)
from realsys.generation.decoding.length_buckets import LengthBucket
from realsys.generation.decoding.linear import Kind, Linear, linear
from realsys.generation.decoding.text_attention import TextAttention

FAST_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

LARGEST_GRANULE = 64
_ROWS_A_THREAD = 4  # fewer rows use another matrix kernel, with other last bits
_GRANULE_OF_GPU = 8  # its kernels' tiles are of multiples of eight rows
_ROTATION_BLOCK = 64  # positions whose angles are computed together


def row_granule() -> int:
    """Returns the multiple to which rows of a batch are padded on a CPU: four for each thread."""
    return min(_ROWS_A_THREAD * max(2, torch.get_num_threads()), LARGEST_GRANULE)


def rounded(n: int, granule: int) -> int:
    """Returns the least multiple of ``granule`` that is ``n`` or more."""
    return -(-n // granule) * granule


def fast_path_obstacle(module: nn.Module) -> str | None:
    """Returns why ``FastForward`` can't compute this model, or None."""
    config: Any = module.config
    # FSDP2 wraps by subclassing, so the class itself may have another name.
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
    head_dim = module.model.layers[0].self_attn.head_dim  # type: ignore[union-attr, index]
    if head_dim * config.num_key_value_heads < MIN_WIDTH:
        return f"head size {head_dim} with {config.num_key_value_heads} key heads"
    for name, part in module.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(part) is not nn.Linear:
            return f"{name} is a {type(part).__name__}"
        biased = getattr(part, "bias", None) is not None
        if biased and not name.endswith(("q_proj", "k_proj", "v_proj")):
            return f"bias on {name}"
    return None


# Layers that read the same, side by side: one copy of them all, or each for itself.
Parts = Sequence[Linear]


@dataclass(frozen=True)
class _LayerWeights:
    attn_norm: Tensor
    qkv: Parts  # all query heads, then key heads, then value heads
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Linear
    mlp_norm: Tensor
    gate_up: Parts
    down: Linear


# Layer, queries, keys and values of the tokens → ``[N, H * D]``.
_Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class FastForward:
    """Forward passes of a module for which ``fast_path_obstacle`` is None; shapes as in attention.py.

    On a GPU it reads the module's weights in place. On a CPU it holds copies of some (fused projections,
    and weights packed by linear.py): call ``reload`` after they changed. ``quantize`` keeps 8-bit copies of
    all linear weights.

    Args:
        as_on_gpu: for tests; None: by the device.
    Attributes:
        granule: rows that go through a matrix together are padded to a multiple of it.
        least_rows: of a cache, for ``granule`` rows or more to look at.
        fused: texts are read by torch's fused attention (``attend_texts``), not by explicit scores.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        quantize: Literal["none"] | Kind = "none",
        as_on_gpu: bool | None = None,
    ) -> None:
        config: Any = module.config
        backbone: Any = module.model
        self.module: Any = module
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim: int = backbone.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self._eps = torch.tensor(self.eps)
        self.lanes = Lanes(self.num_heads, self.num_kv_heads, self.head_dim)
        self.rotary = backbone.rotary_emb
        self.embedding: Tensor = backbone.embed_tokens.weight.data
        self.device = self.embedding.device
        on_gpu = self.device.type != "cpu" if as_on_gpu is None else as_on_gpu
        self.granule = _GRANULE_OF_GPU if on_gpu else row_granule()
        # On a CPU each thread multiplies matrices of its own: more threads than these take other kernels.
        threads = 1 if on_gpu else torch.get_num_threads()
        self.least_rows = -(-threads // self.lanes.num_lanes)
        self.fused = on_gpu
        self._text_attention = TextAttention(self.lanes, self.granule)
        # More than half of the model; one call instead of three counts for a CPU's few rows.
        self._joins = not on_gpu
        self._quantize: Literal["none"] | Kind = quantize
        self._rotation: Tensor = self.embedding.new_empty(0, 2 * self.head_dim)
        self.reload()

    def reload(self) -> None:
        """Takes over the module's current weights."""
        backbone: Any = self.module.model
        self.embedding = backbone.embed_tokens.weight.data
        self.final_norm: Tensor = backbone.norm.weight.data
        self.layers: list[_LayerWeights] = []  # freed first: the copies are most of a model
        self.layers = [self._layer_weights(layer) for layer in backbone.layers]
        self.lm_head = self._linear(self.module.lm_head)

    def _layer_weights(self, layer: Any) -> _LayerWeights:
        attn, mlp = layer.self_attn, layer.mlp
        qkv = (attn.q_proj, attn.k_proj, attn.v_proj)
        normed = hasattr(attn, "q_norm")
        return _LayerWeights(
            attn_norm=layer.input_layernorm.weight.data,
            qkv=self._parts(*qkv),
            q_norm=attn.q_norm.weight.data if normed else None,
            k_norm=attn.k_norm.weight.data if normed else None,
            attn_out=self._linear(attn.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.data,
            gate_up=self._parts(mlp.gate_proj, mlp.up_proj),
            down=self._linear(mlp.down_proj),
        )

    def _parts(self, *parts: Any) -> Parts:
        return [self._linear(*parts)] if self._joins else [self._linear(part) for part in parts]

    def _linear(self, *parts: Any) -> Linear:
        weights = [part.weight.data for part in parts]
        biases = [part.bias.data for part in parts if part.bias is not None]
        weight: Tensor = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias: Tensor | None = torch.cat(biases) if biases else None
        return linear(weight, bias, quantize=self._quantize)

    def cache(self, num_rows: int, width: int) -> KeyValues:
        """Makes an empty cache."""
        return KeyValues(self.lanes, len(self.layers), num_rows, width, self.embedding)

    def padded_length(self, num_rows: int, length: int) -> int:
        """Returns the padded number of tokens per row for ``run``, so that the matrices suit its
        kernels.
        """
        granule = self.granule
        return rounded(length, math.lcm(MIN_QUERIES, granule // math.gcd(num_rows, granule)))

    def run(
        self,
        tokens_BP: Tensor,
        positions_BP: Tensor,
        cache: KeyValues,
        buckets: Sequence[LengthBucket],
        *,
        fresh: bool = False,
    ) -> Tensor:
        """Processes tokens and returns the last layer's output for each, ``[N, hidden]``.

        Row i uses the cache's row i. Each token attends to the positions up to its own; earlier
        ones must have
        been written, its own keys and values are written here. Rows beyond the cache's are padding, whose
        output is meaningless.

        Args:
            tokens_BP: int64; B * P a multiple of the row granule.
            positions_BP: int64, consecutive within a row.
            buckets: cover the rows of the cache, and how much of it is looked at: the ``seen_width`` of
                more than the positions.
            fresh: nothing is in these rows yet.
        """
        length = tokens_BP.shape[1]
        longest = max(bucket.width for bucket in buckets)
        rotation = self._rotation_of(longest).index_select(0, positions_BP.flatten())[:, None]
        cos, sin = rotation.chunk(2, dim=-1)
        padded = len(positions_BP) > cache.num_rows
        own_BP = positions_BP[: cache.num_rows] if padded else positions_BP
        places = cache.places(own_BP)
        if self.fused and length > 1:
            attend = self._reading(own_BP, cache, longest, fresh=fresh)
        elif length > 1 and self.reads_in_blocks(longest):
            attend = self._in_blocks(own_BP, cache)
        else:
            attend = self._decoding(own_BP, cache, buckets)
        num_lines = own_BP.numel() * self.lanes.num_lanes
        x = F.embedding(tokens_BP.flatten(), self.embedding)
        for layer, w in enumerate(self.layers):
            q, k, v = self._queries_keys_values(self._norm(x, w.attn_norm), w, cos, sin)
            if padded:
                k, v = k[:num_lines], v[:num_lines]
            cache.write(layer, places, k, v)
            y = attend(layer, q, k, v)
            if padded:
                y = torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])
            x = w.attn_out.add(x, y)
            h = self._norm(x, w.mlp_norm)
            if len(w.gate_up) == 1:
                gate, up = w.gate_up[0](h).chunk(2, dim=-1)
            else:
                gate, up = (part(h) for part in w.gate_up)
            x = w.down.add(x, F.silu(gate).mul_(up))
        return x

    def _decoding(
        self, positions_BP: Tensor, cache: KeyValues, buckets: Sequence[LengthBucket]
    ) -> _Attend:
        """Makes the attention function with explicit scores, bucket by bucket."""
        lanes, length = self.lanes, positions_BP.shape[1]
        masks = [self._mask(positions_BP, bucket) for bucket in buckets]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            q = lanes.queries(q, length)
            seen = []
            for bucket, mask in zip(buckets, masks, strict=True):
                own = slice(bucket.begin * lanes.num_lanes, bucket.end * lanes.num_lanes)
                k, v = keys[own, :, : bucket.width], values[own, : bucket.width]
                seen.append(lanes.attend(q[own], k, v, mask))
            y = seen[0] if len(seen) == 1 else torch.cat(seen)
            return lanes.outputs(y, length)

        return attend

    def _reading(
        self, positions_BP: Tensor, cache: KeyValues, width: int, *, fresh: bool
    ) -> _Attend:
        """Makes the fused attention function for many tokens per row, over all rows of the cache."""
        num_rows, length = positions_BP.shape
        kv_heads, dim = self.num_kv_heads, self.head_dim
        seen = None
        if not fresh:
            width = min(width, cache.width)
            seen = torch.arange(width, device=self.device) <= positions_BP[:, :, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if fresh:
                k, v = (x.view(num_rows, length, kv_heads, dim) for x in (k, v))
            else:
                k, v = cache.of_heads(layer, num_rows, width)
            q = q.reshape(num_rows, length, self.num_heads, dim)
            y = attend_texts(q, k, v, seen, self.lanes.scale)
            return y.reshape(num_rows * length, -1)

        return attend

    def reads_in_blocks(self, width: int) -> bool:
        """True if texts in rows of ``width`` positions are read block by block (text_attention.py)."""
        return not self.fused and self._text_attention.suits(width, self.embedding.dtype)

    def _in_blocks(self, positions_BP: Tensor, cache: KeyValues) -> _Attend:
        """Makes the attention function for many tokens per row on a CPU, over all rows of the cache."""
        begins: list[int] = positions_BP[:, 0].tolist()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            del k, v
            return self._text_attention.attend(q, cache, layer, begins)

        return attend

    def _mask(self, positions_BP: Tensor, bucket: LengthBucket) -> Tensor:
        own = positions_BP[bucket.begin : bucket.end]
        return self.lanes.mask(own, bucket.width, self.embedding.dtype)

    def logits(self, hidden: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Computes logits ``[rows, vocabulary]`` after those tokens (indices into N; None: all of them)."""
        num = len(hidden)
        if rows is not None:
            num = len(rows)
            padding = [0] * (rounded(num, self.granule) - num)
            hidden = hidden[torch.tensor([*rows, *padding], device=hidden.device)]
        last = self._norm(hidden, self.final_norm)
        return self.lm_head(last)[:num]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        # torch's own needs more kernels, whose number dominates for few rows.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        y: Tensor = (x * inverse).mul_(weight)
        return y

    def _queries_keys_values(
        self, y: Tensor, w: _LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes queries ``[N, H, D]`` and, one line per token and lane, keys and values ``[N *
        L, E]``.
        """
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        joined = len(w.qkv) == 1
        qkv = w.qkv[0](y) if joined else torch.cat([part(y) for part in w.qkv], dim=1)
        qkv = qkv.view(len(y), heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._norm(qk[:, :heads], w.q_norm), self._norm(qk[:, heads:], w.k_norm)
            qk = torch.cat([q, k], dim=1)
        halves_swapped = qk.roll(dim // 2, dims=-1)  # sin holds rotate_half's minus
        qk = (qk * cos).addcmul_(halves_swapped, sin)
        width = self.lanes.width
        return qk[:, :heads], qk[:, heads:].reshape(-1, width), v.reshape(-1, width)

    def _rotation_of(self, width: int) -> Tensor:
        """Returns cos and sin side by side, ``[width or more, 2 D]``; the sin includes
        rotate_half's minus.

        Computed in blocks, so that an angle is the same however far the table reaches.
        """
        if (known := len(self._rotation)) < width:
            blocks = [self._rotation]
            for begin in range(known, max(width, 2 * known), _ROTATION_BLOCK):
                positions = torch.arange(begin, begin + _ROTATION_BLOCK, device=self.device)
                cos, sin = self.rotary(self.embedding, positions[None])
                half = self.head_dim // 2
                sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
                blocks.append(torch.cat([cos, sin], dim=-1)[0])
            self._rotation = torch.cat(blocks)
        return self._rotation
