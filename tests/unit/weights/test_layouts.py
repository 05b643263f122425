"""What each rank holds: hand-worked cases, torch's own chunks, and the refusals."""

from dataclasses import replace
from itertools import product

import golden
import pytest
import torch

from realsys.api.errors import ConfigError, ConfigErrors
from realsys.api.model import ProcessTopology
from realsys.models.shape import ModelShape, Weight
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import (
    fsdp_layout,
    layout_problems,
    megatron_layout,
    split_dim,
    whole_layout,
)

SHAPE = ModelShape(
    family="qwen2",
    hidden_size=12,
    intermediate_size=24,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    vocab_size=20,
    qkv_bias=True,
)
LAYER = "model.layers.{}."


def rows(start, stop, *others):
    return (Box((start, *(0 for _ in others)), (stop, *others)),)


def columns(num_rows, start, stop):
    return (Box((0, start), (num_rows, stop)),)


def test_whole_layout_has_everything_on_every_data_rank():
    layout = whole_layout(SHAPE.weights(), ProcessTopology(data=3))
    assert len(layout) == 3
    assert all(held["lm_head.weight"] == rows(0, 20, 12) for held in layout)
    assert all(list(held) == [w.name for w in SHAPE.weights()] for held in layout)
    with golden.raises(ConfigError):
        whole_layout(SHAPE.weights(), ProcessTopology(tensor=2))


def test_megatron_stages_and_tensor_ranks():
    layout = megatron_layout(SHAPE, ProcessTopology(data=2, tensor=2, pipeline=2))
    # rank = (p · 2 + d) · 2 + t; ranks 1 and 3 are tensor rank 1 of the first stage.
    assert layout[1] == layout[3]
    first, last = layout[1], layout[7]
    assert first["model.embed_tokens.weight"] == rows(10, 20, 12)
    q, k = LAYER + "self_attn.q_proj.", LAYER + "self_attn.k_proj."
    assert first[q.format(0) + "weight"] == rows(8, 16, 12)  # heads 4 … 7, two rows each
    assert first[q.format(0) + "bias"] == rows(8, 16)
    assert first[k.format(1) + "weight"] == rows(4, 8, 12)
    assert first[LAYER.format(1) + "self_attn.o_proj.weight"] == columns(12, 8, 16)
    assert first[LAYER.format(1) + "mlp.down_proj.weight"] == columns(12, 12, 24)
    assert first[LAYER.format(1) + "input_layernorm.weight"] == rows(0, 12)
    assert not any(name.startswith((LAYER.format(2), "model.norm", "lm_head")) for name in first)
    assert last["lm_head.weight"] == rows(10, 20, 12)
    assert last["model.norm.weight"] == rows(0, 12)
    assert LAYER.format(3) + "mlp.up_proj.weight" in last
    assert "model.embed_tokens.weight" not in last


def test_tied_embeddings_are_on_both_ends():
    tied = replace(SHAPE, tied_embeddings=True)
    layout = megatron_layout(tied, ProcessTopology(pipeline=4))
    assert [("model.embed_tokens.weight" in held) for held in layout] == [True, False, False, True]
    assert len(megatron_layout(tied, ProcessTopology())) == 1


def test_critic_head_is_whole_on_the_last_stage():
    layout = megatron_layout(SHAPE.as_critic(), ProcessTopology(tensor=2, pipeline=2))
    assert [held.get("score.weight") for held in layout] == [None] * 2 + [rows(0, 1, 12)] * 2


def test_fsdp_cuts_tensor_first_and_then_rows():
    layout = fsdp_layout(SHAPE.weights(), ProcessTopology(data=3, tensor=2))
    q, o = LAYER.format(0) + "self_attn.q_proj.weight", LAYER.format(0) + "self_attn.o_proj.weight"
    # 16 rows: 8 a tensor rank, ⌈8 / 3⌉ = 3 a data rank. rank = d · 2 + t.
    assert [held[q] for held in layout] == [
        rows(0, 3, 12), rows(8, 11, 12), rows(3, 6, 12), rows(11, 14, 12), rows(6, 8, 12),
        rows(14, 16, 12),
    ]  # fmt: skip
    assert layout[3][o] == (Box((4, 8), (8, 16)),)
    assert layout[0]["model.embed_tokens.weight"] == layout[1]["model.embed_tokens.weight"]
    assert layout[1]["lm_head.weight"] == rows(10, 14, 12)


def test_fsdp_ranks_with_an_empty_part_do_not_name_the_weight():
    layout = fsdp_layout([Weight("score.weight", (1, 4))], ProcessTopology(data=4))
    assert [dict(held) for held in layout] == [{"score.weight": rows(0, 1, 4)}, {}, {}, {}]


@pytest.mark.parametrize(("size", "parts"), list(product((1, 2, 5, 7, 8, 12), (1, 2, 3, 5, 8))))
def test_fsdp_cuts_as_torch_chunk_does(size, parts):
    layout = fsdp_layout([Weight("w", (size, 2))], ProcessTopology(data=parts))
    chunks = torch.arange(size).chunk(parts)
    held = [(h["w"][0].start[0], h["w"][0].stop[0]) for h in layout if "w" in h]
    assert held == [(int(c[0]), int(c[-1]) + 1) for c in chunks]


def test_adapters_and_other_families_are_not_cut_over_the_tensor_axis():
    assert split_dim("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", ()) is None
    assert split_dim("model.layers.0.self_attn.o_proj.bias", ()) is None
    assert split_dim("transformer.wte.weight", ()) is None
    assert split_dim("model.layers.0.self_attn.v_proj.bias", ()) == 0


VOCABULARY = "20 vocabulary rows"


@pytest.mark.parametrize(
    ("topo", "backend", "what", "fix"),
    [
        ("t3", "megatron", ["8 attention heads", "4 key/value heads", VOCABULARY], "t of 1 or 2 or 4"),
        ("t8", "megatron", ["4 key/value heads", VOCABULARY], "t of 1 or 2 or 4"),
        ("t3", "inference", ["8 attention heads", "4 key/value heads", VOCABULARY], "t of 1 or 2 or 4"),
        ("p3", "megatron", ["4 layers can't be split evenly over pipeline degree 3"], "p of 1 or 2 or 4"),
        ("d2p2", "fsdp", ["layout d2t1p2 has 2 pipeline stages"], "d4t1p1, or backend=megatron"),
        ("t5", "fsdp", ["8 attention", "4 key", "24 MLP"], "t of 1 or 2 or 4"),
        ("t3p3", "somebody_elses", [], ""),
        ("d7t4p4", "megatron", [], ""),
    ],
)  # fmt: skip
def test_problems_name_numbers_and_a_way_out(topo, backend, what, fix):
    problems = layout_problems(SHAPE, ProcessTopology.parse(topo), backend, where="actor.parallel")
    assert [
        text for text, p in zip(what, problems, strict=True) if not p.what.startswith(text)
    ] == []
    assert all((p.fix, p.where) == (f"use {fix}", "actor.parallel") for p in problems)


def test_a_head_that_is_not_cut_sets_no_limit():
    odd = replace(SHAPE, vocab_size=21, tied_embeddings=True)
    assert layout_problems(odd, ProcessTopology(tensor=2), "fsdp") == []
    assert layout_problems(odd.as_critic(), ProcessTopology(tensor=2), "fsdp") == []
    assert (
        len(layout_problems(replace(odd, tied_embeddings=False), ProcessTopology(tensor=2), "fsdp"))
        == 1
    )


def test_a_layout_that_does_not_fit_is_refused_with_all_reasons():
    with pytest.raises(ConfigErrors) as caught:
        megatron_layout(SHAPE, ProcessTopology(tensor=3, pipeline=3))
    assert len(caught.value.problems) == 4
    with golden.raises(ConfigError):
        fsdp_layout(SHAPE.weights(), ProcessTopology(pipeline=2))
