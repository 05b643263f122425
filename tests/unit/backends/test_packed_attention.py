"""Packed sequences through a model equal the same sequences one by one, outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from near import assert_near
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from realsys.backends.kernels.packed_attention import can_pack, run_packed
from realsys.backends.kernels.packed_pieces import Pieces, common_prefix, group_by_length

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}
MIXED = [3, 70, 9, 1, 64, 33, 9, 20]
# Lengths of the answers to each question, and how many tokens those have in common.
GROUPS = {
    "one": ([[7]], [0]),
    "equal": ([[9], [9], [9]], [0, 0, 0]),
    "mixed": ([[length] for length in MIXED], [0] * len(MIXED)),
    "with an empty one": ([[5], [0], [24]], [0, 0, 0]),
    "answers to one question": ([[9, 12, 9, 40]], [6]),
    "to several": ([[9, 9], [30, 24, 31], [8]], [7, 20, 0]),
    "all the same": ([[9, 9, 9]], [9]),
    "one is another's beginning": ([[9, 5, 12]], [5]),
}


def drawn(groups: list[list[int]], common: list[int]) -> torch.Tensor:
    """Packed tokens that begin as ``common`` says."""
    draw = torch.Generator().manual_seed(1)
    parts = []
    for lengths, shared in zip(groups, common, strict=True):
        prefix = torch.randint(0, 20, (shared,), generator=draw)
        for i, length in enumerate(lengths):
            own = torch.randint(0, 20, (length - shared,), generator=draw)
            own[:1] = 20 + i  # they differ from here on
            parts += [prefix, own]
    return torch.cat(parts)


def made(auto: Any, config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    for name, value in more.items():
        setattr(config, name, value)
    module = auto.from_config(config, dtype=torch.float64).eval()
    for weight in module.parameters():  # biases and heads that start at 0 would hide mistakes
        weight.data.normal_(std=0.2)
    return module


def gradients(module: Any, outputs: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.arange(outputs.numel(), dtype=outputs.dtype).sin().view_as(outputs)
    return list(torch.autograd.grad((outputs * weights).sum(), list(module.parameters())))


@pytest.mark.thorough
@pytest.mark.parametrize("case", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForTokenClassification])
@pytest.mark.parametrize("family", CONFIGS)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(family, auto, case) -> None:
    module = made(auto, CONFIGS[family], num_labels=1)
    assert can_pack(module)
    tokens, lengths = drawn(*case), [length for group in case[0] for length in group]
    former = module.config._attn_implementation
    packed = run_packed(module, tokens, case[0])
    assert module.config._attn_implementation == former
    alone = [module(input_ids=x[None]).logits[0] for x in tokens.split(lengths) if len(x)]
    assert_near(packed, torch.cat(alone))
    for ours, theirs in zip(
        gradients(module, packed), gradients(module, torch.cat(alone)), strict=True
    ):
        assert_near(ours, theirs, rel=1e-4)  # the models' norms compute in float32


@pytest.mark.parametrize("case", GROUPS.values(), ids=GROUPS)
def test_all_but_the_last_of_each_are_the_same_where_the_last_are_not_asked_for(case) -> None:
    module = made(AutoModelForCausalLM, CONFIGS["qwen3"])
    tokens, lengths = drawn(*case), [length for group in case[0] for length in group]
    asked = torch.cat([torch.arange(n) < max(n - 1, 1) for n in lengths])
    all_of_them = run_packed(module, tokens, case[0])
    some = run_packed(module, tokens, case[0], to_the_end=False)
    assert some.shape == all_of_them.shape
    assert_near(some[asked], all_of_them[asked])
    expected = gradients(module, all_of_them[asked])
    for ours, theirs in zip(gradients(module, some[asked]), expected, strict=True):
        assert_near(ours, theirs, rel=1e-4)


def tokens_computed(case: tuple[list[list[int]], list[int]], *, to_the_end: bool = True) -> int:
    module = made(AutoModelForCausalLM, CONFIGS["llama"])
    seen = []
    layer = module.model.layers[0].mlp.gate_proj
    layer.register_forward_hook(lambda _, x, y: seen.append(tuple(y.shape[:-1])))
    run_packed(module, drawn(*case), case[0], to_the_end=to_the_end)
    ((one, num),) = seen
    assert one == 1
    return num


def test_nothing_is_computed_on_padding() -> None:
    assert tokens_computed(GROUPS["mixed"]) == sum(MIXED)


def test_a_common_beginning_is_computed_once() -> None:
    assert tokens_computed(GROUPS["to several"]) == (7 + 2 + 2) + (20 + 10 + 4 + 11) + 8
    assert tokens_computed(GROUPS["all the same"]) == 9
    little = ([[40, 40]], [1])  # putting it together costs more
    assert tokens_computed(little) == 80


def test_last_tokens_that_nobody_asks_for_are_not_computed() -> None:
    several = GROUPS["to several"]
    assert tokens_computed(several, to_the_end=False) == tokens_computed(several) - 6
    assert tokens_computed(GROUPS["all the same"], to_the_end=False) == 8
    assert tokens_computed(([[1], [9]], [0, 0]), to_the_end=False) == 9
    assert tokens_computed(([[40]], [0]), to_the_end=False) == 40  # one more copy costs more


def test_attention_looks_at_little_padding() -> None:
    lengths = [1 + round(60 * (i / 100) ** 8) for i in range(100)] + [256]
    tokens = torch.arange(sum(lengths))
    pieces = Pieces.of(tokens, [[length] for length in lengths])
    cells = sum(r.num * r.width for r in pieces.rectangles)
    # Short ones share a rectangle whatever they are.
    assert cells < sum(max(x, 16) for x in lengths) / 0.8


def test_rectangles_hold_each_sequence_once_and_none_that_is_much_shorter() -> None:
    found = group_by_length(MIXED)
    assert sorted(i for alike in found for i in alike) == list(range(len(MIXED)))
    assert [[MIXED[i] for i in alike] for alike in found] == [[70, 64], [33], [20], [9, 9, 3, 1]]


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [([[1, 2, 3]], 3), ([[1, 2], [1, 2, 3], [1, 4]], 1), ([[5], [6]], 0), ([[], [1]], 0)],
)
def test_common_prefix(sequences: list[list[int]], expected: int) -> None:
    assert common_prefix(sequences) == expected


def test_a_failed_pass_leaves_the_model_as_it_was() -> None:
    module = made(AutoModelForCausalLM, CONFIGS["llama"])
    former = module.config._attn_implementation
    with pytest.raises(IndexError):
        run_packed(module, torch.tensor([40, 1]), [[2]])
    assert module.config._attn_implementation == former


def test_other_families_and_windows_are_not_packed() -> None:
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1))
    assert not can_pack(gpt2)
    window = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert not can_pack(AutoModelForCausalLM.from_config(window))
