"""What the fast path does on a GPU, done here: fused attention for texts, weights in place, few bands."""

from functools import partial

import pytest
import torch
from near import assert_near
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from realsys.api.model import GenerationHyperparameters
from realsys.generation.decoding import slots
from realsys.generation.decoding.decoder import FastForward
from realsys.generation.decoding.length_buckets import (
    ON_CPU,
    ON_GPU,
    LengthBucket,
    split_into_buckets,
)
from realsys.generation.engine import continuous
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationRequest

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}


def llama():  # two key heads share a lane
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, attention_bias=False)
    )


def qwen3():
    return Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    )


@pytest.fixture(params=[llama, qwen3])
def module(request):
    torch.manual_seed(3)
    return request.param().eval().requires_grad_(False)


def answers(module):
    """Fresh texts of many lengths, then texts that go on behind known beginnings."""
    engine = ContinuousEngine(module, max_running=12)
    found = {}
    draw = torch.Generator().manual_seed(5)
    texts = [torch.randint(61, (n,), generator=draw).tolist() for n in (1, 3, 9, 40, 41, 150, 300)]
    for turn in range(2):
        for i, text in enumerate(texts):
            gconfig = GenerationHyperparameters(max_new_tokens=3 + i, greedy=True)
            request = GenerationRequest(
                rid=f"{turn} {i}", prompt=tuple(text), gconfig=gconfig, seed=i
            )
            engine.submit(request)
        while engine.num_running or engine.num_waiting:
            for o in engine.step():
                if o.finish:
                    found[o.rid] = (list(o.tokens), torch.tensor(o.logprobs), o.cached_tokens)
        texts = [[*text, *found[f"{turn} {i}"][0], 7, 8, 9] for i, text in enumerate(texts)]
    return found


@pytest.mark.parametrize("read_tokens", [8192, 64], ids=["whole", "in pieces"])
def test_answers_are_those_of_the_cpus_way(module, monkeypatch, read_tokens):
    expected = answers(module)
    shapes = []
    attend = continuous.FastForward._reading

    def reading(self, positions, cache, width, *, fresh):
        shapes.append((*positions.shape, fresh))
        return attend(self, positions, cache, width, fresh=fresh)

    monkeypatch.setattr(FastForward, "_reading", reading)
    monkeypatch.setattr(continuous, "FastForward", partial(FastForward, as_on_gpu=True))
    monkeypatch.setattr(slots, "READ_TOKENS_FUSED", read_tokens)
    found = answers(module)
    assert {fresh for _, _, fresh in shapes} == {True, False}
    assert max(rows * length for rows, length, _ in shapes) <= read_tokens
    assert [(t, c) for t, _, c in found.values()] == [(t, c) for t, _, c in expected.values()]
    for rid, (_, logprobs, _) in found.items():
        assert_near(logprobs, expected[rid][1])


def test_no_weight_is_there_twice(module):
    """Copies of fused projections were 57 % of a model, made anew by each call that generates."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    forward = FastForward(module, as_on_gpu=True)
    weights = [
        part.weight
        for layer in forward.layers
        for part in (*layer.qkv, layer.attn_out, *layer.gate_up, layer.down)
    ]
    assert len(weights) == 7 * len(forward.layers)
    assert {w.untyped_storage().data_ptr() for w in weights} <= own


def test_bands_of_a_gpu_are_few():
    """512 rows of up to 8000 tokens were 64 bands, 12 000 calls a step."""
    spread = sorted((16 * n for n in range(512)), reverse=True)
    assert len(split_into_buckets(spread, ON_CPU)) == 64
    buckets = split_into_buckets(spread, ON_GPU)
    assert 1 < len(buckets) <= 8
    assert sum(b.cells for b in buckets) < 1.5 * sum(spread)
    assert split_into_buckets([512] * 4 + [32] * 60, ON_GPU) == [
        LengthBucket(0, 64, 512)
    ]  # not worth the calls
