"""Log-probs of sampler and trainer in bfloat16 where attention scores are large: equally far off."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from realsys.backends.kernels.packed_attention import run_packed
from realsys.generation.decoding.attention import seen_width
from realsys.generation.decoding.decoder import FastForward
from realsys.generation.decoding.length_buckets import LengthBucket

LENGTHS = (130, 40)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module", params=[2, 8], ids=["grouped", "alone"])
def module(request):
    """With key biases of 100, as Qwen2.5 has them: where rotation is slow they are in each score alike."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_key_value_heads=request.param, rope_theta=1e6)
    made = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    head_dim = config.hidden_size // config.num_attention_heads
    for name, parameter in made.named_parameters():
        if name.endswith(("k_proj.bias", "q_proj.bias")):
            large = 100 if "k_proj" in name else 10
            parameter.zero_().view(-1, head_dim)[:, head_dim // 2 - 1] = large
        elif parameter.dim() == 2:
            parameter.mul_(4)
    return made.bfloat16()


@pytest.fixture(scope="module")
def texts():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(64, (n,), generator=draw) for n in LENGTHS]


def logprobs(logits, text):
    return logits[:-1].double().log_softmax(-1).gather(1, text[1:, None])[:, 0]


def by_trainer(module, texts):
    logits = run_packed(module, torch.cat(texts), [[n] for n in LENGTHS])
    parts = torch.split(logits, LENGTHS)
    return torch.cat([logprobs(x, text) for x, text in zip(parts, texts, strict=True)])


def by_engine(module, texts, *, first, as_on_gpu):
    """Some tokens read at once, the others one by one, each text in a row of its own."""
    forward = FastForward(module, as_on_gpu=as_on_gpu)
    found = []
    for text in texts:
        cache = forward.cache(1, seen_width(max(LENGTHS) + forward.granule))
        bands = [LengthBucket(0, 1, cache.width)]
        padding = torch.zeros(forward.padded_length(1, first) - first, dtype=torch.int64)
        tokens = torch.cat([text[:first], padding])[None]
        hidden = forward.run(tokens, torch.arange(tokens.shape[1])[None], cache, bands, fresh=True)
        parts = [forward.logits(hidden)[:first]]
        one = torch.zeros(forward.granule, 1, dtype=torch.int64)
        for i in range(first, len(text)):
            one[0], where = text[i], torch.full_like(one, i)
            parts.append(forward.logits(forward.run(one, where, cache, bands))[:1])
        found.append(logprobs(torch.cat(parts), text))
    return torch.cat(found)


@pytest.mark.thorough
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_the_engine_is_no_further_off_than_the_trainer(module, texts, as_on_gpu):
    """Scores were rounded to bfloat16: one of 350 to a multiple of two, before the softmax."""
    exact = Qwen2ForCausalLM(module.config).eval().double()
    exact.load_state_dict(module.state_dict())
    right = by_trainer(exact, texts)
    trainer = (by_trainer(module, texts) - right).abs()
    engine = (by_engine(module, texts, first=24, as_on_gpu=as_on_gpu) - right).abs()
    assert engine.mean() < 1.1 * trainer.mean()
    assert engine.max() < 1.5 * trainer.max()
