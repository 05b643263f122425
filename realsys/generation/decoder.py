"""The forward pass of generation, for the Llama, Qwen2 and Qwen3 families.

Reads the weights of the Hugging Face module in place, with a key-value cache of fixed size that it
writes without copying. Any other model, or one of these with something unusual in it, takes the
slower generic_decoder.py; ``fast_path_obstacle`` says why. Both keep the same three promises
(``Decoder``). Sampling and the end of answers are engine.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAST_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class Decoder(Protocol):
    """Turns tokens into the logits of the next ones, remembering what it has seen of each row."""

    def prefill(self, input_ids: Tensor, real: Tensor, room: int) -> Tensor:
        """Forgets all, reads prompts, and returns the logits ``[B, V]`` of their next tokens.

        Args:
            input_ids: int64 ``[B, P]``, padded on the left.
            real: bool ``[B, P]``, False on padding.
            room: number of ``step``s that may follow.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each row (int64 ``[B]``); logits ``[B, V]`` of the next."""

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows (int64), in this order; one may come twice."""


def fast_path_obstacle(module: nn.Module) -> str | None:
    """Why ``FastDecoder`` can't compute this model, or None."""
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


@dataclass(frozen=True)
class _LayerWeights:
    attn_norm: Tensor
    qkv: Tensor  # rows: all query heads, then key heads, then value heads
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def _layer_weights(layer: Any) -> _LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    qkv = (attn.q_proj, attn.k_proj, attn.v_proj)
    biased = attn.q_proj.bias is not None
    return _LayerWeights(
        attn_norm=layer.input_layernorm.weight,
        qkv=torch.cat([p.weight for p in qkv]),
        qkv_bias=torch.cat([p.bias for p in qkv]) if biased else None,
        q_norm=attn.q_norm.weight if hasattr(attn, "q_norm") else None,
        k_norm=attn.k_norm.weight if hasattr(attn, "k_norm") else None,
        attn_out=attn.o_proj.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )


class FastDecoder:
    """Decoder over a module for which ``fast_path_obstacle`` is None.

    Holds a copy of the fused projections (about three quarters of a layer's weights) for as long
    as it lives: make one per ``generate`` call, as the weights change between calls.

    Shape suffixes: B rows, N tokens, H query heads, K key-value heads, G = H / K, D head size.
    """

    def __init__(self, module: nn.Module) -> None:
        config: Any = module.config
        backbone: Any = module.model
        head: Any = module.lm_head
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim: int = backbone.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.rotary = backbone.rotary_emb
        self.embedding: Tensor = backbone.embed_tokens.weight
        self.final_norm: Tensor = backbone.norm.weight
        self.lm_head: Tensor = head.weight
        self.layers = [_layer_weights(layer) for layer in backbone.layers]

    def prefill(self, input_ids: Tensor, real: Tensor, room: int) -> Tensor:
        num_rows, length = input_ids.shape
        shape = (num_rows, 2, self.num_kv_heads, length + room, self.head_dim)
        self.cache = [self.embedding.new_empty(shape) for _ in self.layers]
        self.length = 0
        self.num_padding = (~real).sum(dim=1)
        positions = torch.arange(length + room, device=input_ids.device) - self.num_padding[:, None]
        positions = positions.clamp_(min=0)
        self.cos, self.sin = self._rotation(positions)
        self._set_step_mask(length + room)
        mask = None
        if self.step_mask is not None:
            causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
            # Padding sees itself: softmax over nothing is NaN, and would spread by way of the cache.
            itself = torch.eye(length, dtype=torch.bool, device=real.device)
            mask = ((causal & real[:, None, :]) | itself)[:, None]
        return self._forward(input_ids, mask)

    def step(self, tokens: Tensor) -> Tensor:
        mask = None if self.step_mask is None else self.step_mask[..., : self.length + 1]
        return self._forward(tokens[:, None], mask)

    def select(self, rows: Tensor) -> None:
        for i, old in enumerate(self.cache):  # one layer at a time, to hold few copies at once
            self.cache[i] = old.new_empty((len(rows), *old.shape[1:]))
            self.cache[i][:, :, :, : self.length] = old[:, :, :, : self.length][rows]
        self.num_padding = self.num_padding[rows]
        self.cos, self.sin = (t[rows] if len(t) > 1 else t for t in (self.cos, self.sin))
        self._set_step_mask(self.cache[0].shape[3])

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B or 1, T, 1, D]``, the sin with the minus sign of rotate_half in it."""
        if not bool(self.num_padding.any()):
            positions = positions[:1]
        cos, sin = self.rotary(self.embedding, positions)
        half = self.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[:, :, None], sin[:, :, None]

    def _set_step_mask(self, num_slots: int) -> None:
        """What is added to the scores of a decoding step: ``[B, 1, 1, T]``, or None for nothing."""
        self.step_mask = None
        if bool(self.num_padding.any()):
            slots = torch.arange(num_slots, device=self.num_padding.device)
            padding = (slots < self.num_padding[:, None])[:, None, None]
            zeros = self.embedding.new_zeros(padding.shape)
            self.step_mask = zeros.masked_fill_(padding, -torch.inf)

    def _forward(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        num_rows, num_new = input_ids.shape
        self.length += num_new
        x = F.embedding(input_ids.flatten(), self.embedding)
        size = (x.shape[-1],)
        for w, cache in zip(self.layers, self.cache, strict=True):
            y = F.rms_norm(x, size, w.attn_norm, self.eps)
            qkv = F.linear(y, w.qkv, w.qkv_bias).view(num_rows, num_new, -1)
            y = self._attention(qkv, w, cache, mask).reshape(num_rows * num_new, -1)
            x = torch.addmm(x, y, w.attn_out.t())
            y = F.rms_norm(x, size, w.mlp_norm, self.eps)
            gate, up = F.linear(y, w.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), w.down.t())
        last = x.view(num_rows, num_new, -1)[:, -1]
        return F.linear(F.rms_norm(last, size, self.final_norm, self.eps), self.lm_head)

    def _attention(
        self, qkv: Tensor, w: _LayerWeights, cache: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Writes the new keys and values; what the new queries see, ``[B, N, H, D]``."""
        num_rows, num_new, _ = qkv.shape
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = qkv.view(num_rows, num_new, heads + 2 * kv_heads, dim)
        qk_BNHD, v_BNKD = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if w.q_norm is not None and w.k_norm is not None:
            q = F.rms_norm(qk_BNHD[:, :, :heads], (dim,), w.q_norm, self.eps)
            k = F.rms_norm(qk_BNHD[:, :, heads:], (dim,), w.k_norm, self.eps)
            qk_BNHD = torch.cat([q, k], dim=2)
        new = slice(self.length - num_new, self.length)
        halves_swapped = qk_BNHD.roll(dim // 2, dims=-1)  # sin holds rotate_half's minus
        qk_BNHD = (qk_BNHD * self.cos[:, new]).addcmul_(halves_swapped, self.sin[:, new])
        cache[:, 0, :, new] = qk_BNHD[:, :, heads:].transpose(1, 2)
        cache[:, 1, :, new] = v_BNKD.transpose(1, 2)
        k_BKTD, v_BKTD = cache[:, 0, :, : self.length], cache[:, 1, :, : self.length]
        q_BNHD = qk_BNHD[:, :, :heads]
        if num_new == 1:
            # The query heads that share a key head see the same keys: they stand in as positions.
            q_BKGD = q_BNHD.reshape(num_rows, kv_heads, heads // kv_heads, dim)
            y_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKTD, v_BKTD, attn_mask=mask)
            return y_BKGD.view(num_rows, 1, heads, dim)
        y_BHND = F.scaled_dot_product_attention(
            q_BNHD.transpose(1, 2),
            k_BKTD.repeat_interleave(heads // kv_heads, dim=1),
            v_BKTD.repeat_interleave(heads // kv_heads, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return y_BHND.transpose(1, 2)
