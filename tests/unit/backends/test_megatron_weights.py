"""Which rows of Megatron's parameters are which part of a Hugging Face weight."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from realsys.api.model import ProcessTopology
from realsys.backends.megatron.megatron_weights import stage_slices, views_of
from realsys.models.shape import ModelShape
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import megatron_layout


@st.composite
def cut_models(draw):
    """A shape of any family, and a topology that divides it."""
    tensor, pipeline = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 3)))
    kv_heads = tensor * draw(st.integers(1, 2))
    shape = ModelShape(
        family=draw(st.sampled_from(("llama", "qwen2", "qwen3"))),
        hidden_size=draw(st.integers(1, 5)),
        intermediate_size=tensor * draw(st.integers(1, 3)),
        num_layers=pipeline * draw(st.integers(1, 2)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        vocab_size=tensor * draw(st.integers(1, 4)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    shape = shape.as_critic() if draw(st.booleans()) else shape
    return shape, ProcessTopology(data=draw(st.integers(1, 2)), tensor=tensor, pipeline=pipeline)


@given(cut_models(), st.booleans())
@settings(deadline=None)
def test_slices_are_the_layout_that_is_promised(model, fused_norms):
    shape, topo = model
    for rank, holding in enumerate(megatron_layout(shape, topo)):
        held = {}
        for part in stage_slices(shape, topo, rank, fused_norms=fused_norms):
            held.setdefault(part.name, []).append(part.box)
        assert held.keys() == holding.keys()
        for name, boxes in held.items():
            assert cells(boxes) == cells(holding[name])
            assert sum(b.numel for b in boxes) == len(cells(boxes)), "no element twice"


@given(cut_models(), st.booleans())
@settings(deadline=None)
def test_rows_of_each_parameter_are_taken_once_and_without_gaps(model, fused_norms):
    shape, topo = model
    for rank in range(topo.world_size):
        rows = {}
        for part in stage_slices(shape, topo, rank, fused_norms=fused_norms):
            assert part.stop - part.start == part.box.shape[0]
            rows.setdefault(part.parameter, []).append((part.start, part.stop))
        for runs in rows.values():
            bounds = sorted(runs)
            assert bounds[0][0] == 0
            assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def cells(boxes):
    """All indices in ``boxes``."""
    found = set()
    for box in boxes:
        ranges = [range(a, b) for a, b in zip(box.start, box.stop, strict=True)]
        columns = ranges[1] if len(ranges) > 1 else range(1)
        found |= {(row, column) for row in ranges[0] for column in columns}
    return found


def test_queries_keys_and_values_stand_together_by_group():
    # 4 heads of 2 numbers, 2 key/value heads; tensor rank 1 has heads 2 and 3 with the second group.
    shape = ModelShape(
        family="llama",
        hidden_size=3,
        intermediate_size=4,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        vocab_size=6,
    )
    slices = stage_slices(shape, ProcessTopology(tensor=2), 1)
    fused = [s for s in slices if s.parameter.endswith("linear_qkv.weight")]
    assert [(s.name[-13:-7], s.box, s.start, s.stop) for s in fused] == [
        ("q_proj", Box((4, 0), (8, 3)), 0, 4),
        ("k_proj", Box((2, 0), (4, 3)), 4, 6),
        ("v_proj", Box((2, 0), (4, 3)), 6, 8),
    ]


def test_views_write_through():
    shape = ModelShape(
        family="llama",
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=4,
    )
    module = nn.Module()
    module.output_layer = nn.Linear(2, 4, bias=False)
    head = [s for s in stage_slices(shape, ProcessTopology(), 0) if s.name == "lm_head.weight"]
    [(box, view)] = views_of(module, head)["lm_head.weight"]
    assert box == Box.whole((4, 2))
    view.copy_(torch.arange(8.0).view(4, 2))
    assert module.output_layer.weight.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("fused", [True, False])
def test_fused_norms_belong_to_the_layer_behind_them(fused):
    shape = ModelShape(
        family="llama",
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=4,
    )
    slices = stage_slices(shape, ProcessTopology(), 0, fused_norms=fused)
    found = {s.name.split(".")[-2]: s.parameter.split(".")[-2] for s in slices}
    expected = ("linear_qkv", "linear_fc1") if fused else ("input_layernorm", "pre_mlp_layernorm")
    assert (found["input_layernorm"], found["post_attention_layernorm"]) == expected
