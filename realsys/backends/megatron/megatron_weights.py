"""Maps each Hugging Face weight to rows of the parameters of a Megatron stage.

Megatron fuses weights: query, key and value rows are interleaved per group of heads, gate precedes up.
Every part that a process holds is a run of whole rows of one of its parameters, so it can be read and
written in place. The model's shape alone determines the mapping (``stage_slices``, pure).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from realsys.api.model import ModuleSource, ProcessTopology
from realsys.models.shape import ModelShape
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import MEGATRON_VOCABULARY, split_dim

Views = Mapping[str, Sequence[tuple[Box, Tensor]]]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Slice:
    """Part ``box`` of the weight ``name``, stored in rows ``start … stop`` of the stage's ``parameter``."""

    name: str
    box: Box
    parameter: str
    start: int
    stop: int


def stage_slices(
    shape: ModelShape, topo: ProcessTopology, rank: int, *, fused_norms: bool = False
) -> list[Slice]:
    """Lists everything that ``rank`` holds, in the order of the layers.

    Args:
        fused_norms: layers are of Transformer Engine, which stores a norm in the linear layer after it.
    """
    stage, _, t = topo.coordinate(rank)
    last = topo.pipeline - 1
    held = _Held(topo.tensor, t)
    if stage == 0:
        held.rows(
            EMBEDDING, shape.vocab_size, shape.hidden_size, "embedding.word_embeddings.weight"
        )
    per_stage = shape.num_layers // topo.pipeline
    for i in range(per_stage):
        _layer(held, shape, stage * per_stage + i, f"decoder.layers.{i}.", fused_norms)
    if stage == last:
        held.whole("model.norm.weight", (shape.hidden_size,), "decoder.final_layernorm.weight")
        if shape.critic:
            held.whole("score.weight", (1, shape.hidden_size), "output_layer.weight")
            held.whole("score.bias", (1,), "output_layer.bias")
        elif not shape.tied_embeddings or last > 0:
            name = EMBEDDING if shape.tied_embeddings else HEAD
            held.rows(name, shape.vocab_size, shape.hidden_size, "output_layer.weight")
    return held.slices


def _layer(held: _Held, shape: ModelShape, layer: int, at: str, fused_norms: bool) -> None:
    hf, hidden, ffn = f"model.layers.{layer}.", shape.hidden_size, shape.intermediate_size
    qkv, fc1 = f"{at}self_attention.linear_qkv.", f"{at}mlp.linear_fc1."
    first, second = (
        (f"{qkv}layer_norm_weight", f"{fc1}layer_norm_weight")
        if fused_norms
        else (f"{at}input_layernorm.weight", f"{at}pre_mlp_layernorm.weight")
    )
    held.whole(f"{hf}input_layernorm.weight", (hidden,), first)
    held.attention(shape, hf, "weight", (hidden,), f"{qkv}weight")
    if shape.qkv_bias:
        held.attention(shape, hf, "bias", (), f"{qkv}bias")
    if shape.qk_norm:
        for n in "qk":
            parameter = f"{at}self_attention.{n}_layernorm.weight"
            held.whole(f"{hf}self_attn.{n}_norm.weight", (shape.head_dim,), parameter)
    held.columns(
        f"{hf}self_attn.o_proj.weight",
        hidden,
        shape.q_size,
        f"{at}self_attention.linear_proj.weight",
    )
    held.whole(f"{hf}post_attention_layernorm.weight", (hidden,), second)
    held.rows(f"{hf}mlp.gate_proj.weight", ffn, hidden, f"{fc1}weight")
    held.rows(f"{hf}mlp.up_proj.weight", ffn, hidden, f"{fc1}weight", after=ffn // held.tensor)
    held.columns(f"{hf}mlp.down_proj.weight", hidden, ffn, f"{at}mlp.linear_fc2.weight")


class _Held:
    """Collects the slices of one tensor rank. Sizes divide evenly (``layout_problems``)."""

    def __init__(self, tensor: int, t: int) -> None:
        self.tensor, self.t = tensor, t
        self.slices: list[Slice] = []

    def whole(self, name: str, shape: tuple[int, ...], parameter: str) -> None:
        self.slices.append(Slice(name, Box.whole(shape), parameter, 0, shape[0]))

    def rows(self, name: str, rows: int, columns: int, parameter: str, *, after: int = 0) -> None:
        own = rows // self.tensor
        box = Box((self.t * own, 0), ((self.t + 1) * own, columns))
        self.slices.append(Slice(name, box, parameter, after, after + own))

    def columns(self, name: str, rows: int, columns: int, parameter: str) -> None:
        own = columns // self.tensor
        box = Box((0, self.t * own), (rows, (self.t + 1) * own))
        self.slices.append(Slice(name, box, parameter, 0, rows))

    def attention(
        self, shape: ModelShape, hf: str, kind: str, rest: tuple[int, ...], parameter: str
    ) -> None:
        """Adds one projection's rows: fused by group of heads as queries, key, value of each group."""
        queries = shape.q_size // shape.num_kv_heads
        sizes = {"q": queries, "k": shape.head_dim, "v": shape.head_dim}
        own = shape.num_kv_heads // self.tensor
        row = 0
        for group in range(self.t * own, (self.t + 1) * own):
            for n, size in sizes.items():
                box = Box((group * size, *(0 for _ in rest)), ((group + 1) * size, *rest))
                name = f"{hf}self_attn.{n}_proj.{kind}"
                self.slices.append(Slice(name, box, parameter, row, row + size))
                row += size


def mark_cut_parameters(module: nn.Module, slices: Sequence[Slice]) -> None:
    """Marks for Megatron which parameters differ between tensor ranks, so that norms count them all.

    Its layers mark them only when they initialise random weights.
    """
    parameters = dict(module.named_parameters())
    for part in slices:
        parameter = parameters[part.parameter]
        dim = split_dim(part.name, MEGATRON_VOCABULARY)
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def views_of(module: nn.Module, slices: Sequence[Slice]) -> dict[str, list[tuple[Box, Tensor]]]:
    """Returns views of the parameters of ``module``, by Hugging Face name."""
    parameters = dict(module.named_parameters())
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for part in slices:
        view = parameters[part.parameter].data[part.start : part.stop]
        found.setdefault(part.name, []).append((part.box, view))
    return found


@torch.no_grad()
def load(views: Views, source: ModuleSource) -> None:
    """Reads the held part of each weight into the views."""
    for name, pieces in views.items():
        for box, view in pieces:
            source.read_into(view, name, box.start, box.stop)
