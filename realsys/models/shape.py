"""Dimensions of a decoder-only language model, and the names and shapes of its weights (no torch).

Used for everything decided before a model exists: layouts, memory, transfer plans. Names are those of
the Hugging Face module, to which every layout refers. Families: Llama, Qwen2, Qwen3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import parse_json, read_bounded_text
from realsys.api.errors import CheckpointError, ConfigError, did_you_mean
from realsys.api.options import ALL_LINEAR

FAMILIES = ("llama", "qwen2", "qwen3")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Largest sizes of a config.json that are taken, many times those of any model: weights are listed by them.
LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_nextn_predict_layers"), 2_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
    **dict.fromkeys(("n_shared_experts", "num_experts_per_tok"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 1 << 24),
    "vocab_size": 1 << 26,
}
# Parts of names whose weights have two dimensions and belong to no linear layer of transformers.
_OTHERS = ("gate", "router", "experts", "wte", "wpe")
# transformers holds the experts of a mixture as one weight, and peft would take these names for them,
# those of shared experts too.
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


@dataclass(frozen=True)
class Weight:
    """One tensor of a model: its Hugging Face name and full shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a model; a ``critic`` has a head with one output per token instead of the
    vocabulary's.

    Attributes:
        family: ``model_type`` of the Hugging Face config, one of ``FAMILIES``.
        qkv_bias: query, key and value projections have biases (Qwen2).
        qk_norm: queries and keys are normalised per head (Qwen3).
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int = 0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    critic: bool = False

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    def as_critic(self) -> ModelShape:
        """Returns the same body with a value head."""
        return replace(self, critic=True, tied_embeddings=False)

    def weights(self) -> tuple[Weight, ...]:
        """Lists all weights in the order of the layers; a tied head is listed once."""
        return _weights_of(self)

    def layer_weights(self, layer: int) -> list[Weight]:
        """Lists the weights of one transformer layer."""
        at, hidden = f"model.layers.{layer}.", self.hidden_size
        rows = {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
        found = [Weight(f"{at}self_attn.{n}_proj.weight", (r, hidden)) for n, r in rows.items()]
        if self.qkv_bias:
            found += [Weight(f"{at}self_attn.{n}_proj.bias", (r,)) for n, r in rows.items()]
        found.append(Weight(f"{at}self_attn.o_proj.weight", (hidden, self.q_size)))
        if self.qk_norm:
            found += [Weight(f"{at}self_attn.{n}_norm.weight", (self.head_dim,)) for n in "qk"]
        found += [
            Weight(f"{at}mlp.gate_proj.weight", (self.intermediate_size, hidden)),
            Weight(f"{at}mlp.up_proj.weight", (self.intermediate_size, hidden)),
            Weight(f"{at}mlp.down_proj.weight", (hidden, self.intermediate_size)),
            Weight(f"{at}input_layernorm.weight", (hidden,)),
            Weight(f"{at}post_attention_layernorm.weight", (hidden,)),
        ]
        return found

    @property
    def num_params(self) -> int:
        """Number of elements of all weights."""
        return _num_params_of(self)


# A plan asks for them hundreds of times.
@functools.lru_cache(maxsize=32)
def _weights_of(shape: ModelShape) -> tuple[Weight, ...]:
    found = [Weight("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))]
    for layer in range(shape.num_layers):
        found += shape.layer_weights(layer)
    found.append(Weight("model.norm.weight", (shape.hidden_size,)))
    if shape.critic:
        found += [Weight("score.weight", (1, shape.hidden_size)), Weight("score.bias", (1,))]
    elif not shape.tied_embeddings:
        found.append(Weight("lm_head.weight", (shape.vocab_size, shape.hidden_size)))
    return tuple(found)


@functools.lru_cache(maxsize=32)
def _num_params_of(shape: ModelShape) -> int:
    return sum(w.numel for w in _weights_of(shape))


def read_shape(path: str | Path, *, critic: bool = False) -> ModelShape:
    """Reads a model's shape from the ``config.json`` of a Hugging Face directory.

    Raises:
        CheckpointError: no readable ``config.json``, or a size is missing.
        ConfigError: the family or its biases are not supported.
    """
    file = Path(path) / "config.json"
    try:
        config = parse_json(read_bounded_text(file))
        return shape_of(config, critic=critic, where=str(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the model's sizes can't be read: {type(error).__name__}: {error}",
            where=str(file),
            fix="give the path of a Hugging Face model directory",
        ) from error


def shape_of(config: dict[str, Any], *, critic: bool = False, where: str = "config") -> ModelShape:
    """Derives the shape from a Hugging Face config (as a dict).

    Raises:
        ConfigError: the family or its biases are not supported. KeyError, TypeError: a size is missing or
            none.
    """
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ConfigError(
            f"weights of model_type {family!r} can't be laid out over tensor and pipeline axes",
            where=where,
            fix=f"{did_you_mean(family, FAMILIES)}; with data axes only, backend=fsdp takes any",
        )
    biased = [n for n in ("attention_bias", "mlp_bias") if config.get(n)]
    if biased:
        raise ConfigError(
            f"biases other than those of queries, keys and values ({biased[0]}) are not supported",
            where=where,
            fix="use data axes only (backend=fsdp), or a model without them",
        )
    if (fault := size_fault(config)) is not None:
        raise TypeError(fault)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    shape = ModelShape(
        family=family,
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings") or 0,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    for size in fields(shape):
        value = getattr(shape, size.name)
        if size.type == "int" and (not isinstance(value, int) or not 0 <= value < 2**31):
            raise TypeError(f"{size.name} is {value!r}, not a whole number")
    return shape.as_critic() if critic else shape


def size_fault(config: Mapping[str, Any]) -> str | None:
    """Returns why a size of a config.json can't be one of a model, before anything is made of that size."""
    nested = config.get("text_config")
    for sizes in (config, nested if isinstance(nested, dict) else {}):
        for name, largest in LARGEST.items():
            value = sizes.get(name)
            if isinstance(value, int | float) and value > largest:
                return f"{name} is {value}, the limit is {largest:,}"
    return None


# ---- linear layers, which can have adapters ----


def linear_names(weights: Iterable[Weight]) -> frozenset[str]:
    """Returns the last parts of the names of all linear layers that can have adapters; a head is none.

    Args:
        weights: all weights of a model, by their names in the module or in the files.
    """
    listed = tuple(weights)
    found = {weight.name.split(".")[-2] for weight in listed if _is_linear(weight)}
    return frozenset(found - (_OF_EXPERTS if has_experts(w.name for w in listed) else set()))


def adapted(weights: Iterable[Weight], targets: Collection[str]) -> tuple[Weight, ...]:
    """Returns the weights that get an adapter, as ``targets`` (``LoRAOptions.target_modules``) say."""
    listed = tuple(weights)
    names = linear_names(listed)
    chosen = names if ALL_LINEAR in targets else names.intersection(targets)
    return tuple(w for w in listed if _is_linear(w) and w.name.split(".")[-2] in chosen)


def has_experts(names: Iterable[str]) -> bool:
    """True if weights of these names are those of a mixture of experts."""
    return any(".experts." in name for name in names)


def _is_linear(weight: Weight) -> bool:
    *parts, kind = weight.name.split(".")
    return (
        kind == "weight"
        and len(weight.shape) == 2
        and len(parts) > 1  # a head's name has no dot
        and "embed" not in parts[-1]
        and not any(part in _OTHERS for part in parts)
    )
