"""Every model family against transformers: its ``generate`` and its full forward."""

import golden
import pytest
import torch
from near import assert_near
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from realsys.api.errors import DataError, InternalError
from realsys.api.model import GenerationHyperparameters
from realsys.generation.decoding.decoder import fast_path_obstacle
from realsys.generation.engine.embedded_engine import generate

pytestmark = pytest.mark.usefixtures("one_thread")

PAD, EOS = 0, 2
SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def build(name):
    torch.manual_seed(5)
    match name:
        case "llama":
            module = LlamaForCausalLM(LlamaConfig(**SIZES))
        case "llama_tied":
            module = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
        case "llama3_rope":
            config = LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, head_dim=16)
            module = LlamaForCausalLM(config)
        case "llama_attention_bias":  # on the output projection too: no fast path
            module = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
        case "qwen2":
            module = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        case "qwen2_sliding":
            sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
            module = Qwen2ForCausalLM(Qwen2Config(**SIZES, **sliding))
        case "qwen3":
            module = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
        case _:
            config = GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64)
            module = GPT2LMHeadModel(config)
    with (
        torch.no_grad()
    ):  # random norms and biases, and logits far enough apart to be worth testing
        for name, parameter in module.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
            if "embed" in name or "wte" in name or "lm_head" in name:
                parameter.mul_(3 if name == "model.embed_tokens.weight" else 12)
    return module.eval()


FAST = ["llama", "llama_tied", "llama3_rope", "qwen2", "qwen3"]
GENERIC = ["qwen2_sliding", "gpt2"]


@pytest.fixture(scope="module", params=[*FAST, *GENERIC])
def module(request):
    return build(request.param)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def ragged_prompts(count=5):
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (count,), generator=draw).tolist()
    prompts = [torch.randint(3, 24, (n,), generator=draw) for n in lengths]
    return [*prompts, prompts[0], prompts[2]]  # two of them twice, as in a group


def answer(module, prompts, *, seeds=None, eos=(EOS,), max_batch=None, **settings):
    settings = {"max_new_tokens": 12, **settings}
    return generate(
        module,
        prompts,
        GenerationHyperparameters(**settings),
        eos_token_ids=eos,
        pad_token_id=PAD,
        row_seeds=torch.arange(len(prompts)) if seeds is None else seeds,
        max_batch=max_batch,
    )


def as_lists(result):
    return [t.tolist() for t in result.tokens]


def full_forward_logprobs(module, prompt, tokens, temperature):
    ids = torch.cat([prompt, tokens])[None]
    with torch.no_grad():
        logprobs = (module(ids).logits[0].float() / temperature).log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("name", FAST)
def test_known_families_take_the_fast_path(name):
    assert fast_path_obstacle(build(name)) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama_attention_bias", "o_proj"),
        ("qwen2_sliding", "sliding-window"),
        ("gpt2", "GPT2LMHeadModel"),
    ],
)
def test_unusual_models_do_not(name, why):
    assert why in fast_path_obstacle(build(name))


def test_wrapped_layers_and_growing_ropes_do_not(llama):
    changed = build("llama")
    changed.model.layers[1].self_attn.v_proj = torch.nn.Identity()
    assert "v_proj" in fast_path_obstacle(changed)
    changed = build("llama")
    changed.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in fast_path_obstacle(changed)


@pytest.mark.thorough
def test_greedy_tokens_are_those_of_transformers(module):
    prompts = ragged_prompts()
    result = answer(module, prompts, greedy=True)
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        expected = module.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        assert tokens.tolist() == expected[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_a_full_forward(module):
    prompts = ragged_prompts()
    result = answer(module, prompts, temperature=0.7)
    for prompt, tokens, logprobs in zip(prompts, result.tokens, result.logprobs, strict=True):
        expected = full_forward_logprobs(module, prompt, tokens, 0.7)
        assert logprobs.dtype == torch.float32
        assert_near(logprobs, expected)


@pytest.mark.thorough
def test_a_row_does_not_depend_on_its_neighbours(module):
    prompts, seeds = ragged_prompts(), torch.arange(7) * 1000
    stops = {"stop_token_ids": (3, 4, 5, 6)}  # rows end early, so that the batch is compacted
    together = answer(module, prompts, seeds=seeds, **stops)
    assert len({len(t) for t in together.tokens}) > 2
    for i, prompt in enumerate(prompts):
        alone = answer(module, [prompt], seeds=seeds[i : i + 1], **stops)
        assert alone.tokens[0].tolist() == together.tokens[i].tolist()
        assert_near(alone.logprobs[0], together.logprobs[i])
    in_threes = answer(module, prompts, seeds=seeds, max_batch=3, **stops)
    assert as_lists(in_threes) == as_lists(together)
    assert torch.equal(in_threes.truncated, together.truncated)


def test_the_same_call_gives_the_same_bits(module):
    prompts = ragged_prompts()
    once, again = answer(module, prompts), answer(module, prompts)
    assert as_lists(once) == as_lists(again)
    assert all(map(torch.equal, once.logprobs, again.logprobs))


def test_answers_to_one_prompt_differ_by_seed_alone(llama):
    prompts = [torch.tensor([5, 6, 7])] * 4
    tokens = as_lists(answer(llama, prompts, seeds=torch.tensor([1, 2, 1, 3])))
    assert tokens[0] == tokens[2]
    assert len({tuple(t) for t in tokens}) == 3


def test_first_tokens_follow_the_models_distribution(llama):
    prompt, draws = torch.tensor([5, 6, 7]), 4000
    result = answer(llama, [prompt] * draws, max_new_tokens=1, temperature=3.0)
    counts = torch.bincount(torch.cat(result.tokens), minlength=24)
    with torch.no_grad():
        expected = (llama(prompt[None]).logits[0, -1] / 3.0).softmax(-1) * draws
    common = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[common].sum().item()
    assert 15 <= common.sum() <= 24
    assert chi_square < 49.7  # 23 degrees of freedom at most, p = 0.001


def test_an_answer_ends_with_its_stop_token_or_is_truncated(llama):
    prompts = [torch.tensor([3 + i % 20, 4]) for i in range(40)]
    result = answer(llama, prompts, stop_token_ids=(9,), temperature=2.0)
    assert 0 < result.truncated.sum() < 40
    for tokens, truncated in zip(as_lists(result), result.truncated.tolist(), strict=True):
        assert truncated == (tokens[-1] not in (EOS, 9))
        assert not {EOS, 9} & set(tokens[:-1])
        assert len(tokens) == 12 or not truncated


def test_min_new_tokens_come_before_any_stop_token(llama):
    prompts, stops = [torch.tensor([5, 6])] * 8, tuple(range(3, 20))
    without = answer(llama, prompts, stop_token_ids=stops)
    assert min(map(len, without.tokens)) == 1
    result = answer(llama, prompts, stop_token_ids=stops, min_new_tokens=4)
    assert min(map(len, result.tokens)) >= 5  # four, and then a stop token at the earliest
    for i, (prompt, tokens) in enumerate(zip(prompts, result.tokens, strict=True)):
        logits = llama(torch.cat([prompt, tokens])[None]).logits[0, 1:-1].detach()
        logits[:4, [*stops, EOS]] = -torch.inf  # over what could be sampled
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert_near(result.logprobs[i], expected)
        assert [bool(kept) for kept in result.kept[i]] == [t < 4 for t in range(len(tokens))]


def test_without_stop_tokens_every_answer_is_truncated(llama):
    result = answer(llama, ragged_prompts(), eos=())
    assert result.truncated.all()
    assert {len(t) for t in result.tokens} == {12}


def test_top_k_of_one_is_greedy(module):
    prompts = ragged_prompts()
    greedy = answer(module, prompts, greedy=True, temperature=0.7)
    top_one = answer(module, prompts, top_k=1, temperature=0.7)
    assert as_lists(greedy) == as_lists(top_one)
    assert greedy.kept is None
    for tokens, logprobs, kept in zip(top_one.tokens, top_one.logprobs, top_one.kept, strict=True):
        assert not logprobs.any()  # of sets of one
        assert torch.equal(
            torch.frombuffer(bytearray(b"".join(kept)), dtype=torch.int32).long(), tokens
        )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_models_answer(name):
    result = answer(build(name).bfloat16(), ragged_prompts(), temperature=0.7)
    assert all(torch.isfinite(p).all() and (p <= 0).all() for p in result.logprobs)
    assert {p.dtype for p in result.logprobs} == {torch.float32}


def test_no_dropout_and_the_mode_is_put_back():
    module = build("gpt2").train()  # dropout 0.1
    module.transformer.h[0].eval()
    training = [part.training for part in module.modules()]
    tokens = as_lists(answer(module, ragged_prompts()))
    assert [part.training for part in module.modules()] == training
    assert tokens == as_lists(answer(module.eval(), ragged_prompts()))


def test_results_can_be_trained_on(llama):
    result = answer(llama, [torch.tensor([5, 6])])
    weight = torch.ones_like(result.logprobs[0], requires_grad=True)
    (weight * result.logprobs[0]).sum().backward()
    assert torch.equal(weight.grad, result.logprobs[0])


def test_nothing_to_answer_gives_nothing(llama):
    result = answer(llama, [])
    assert (result.tokens, result.logprobs, len(result.truncated)) == ([], [], 0)


def test_impossible_prompts_are_refused(llama):
    with golden.raises(DataError):
        answer(llama, [torch.tensor([5]), torch.tensor([]).long()])
    with golden.raises(DataError):
        answer(llama, [torch.full((60,), 5)])
    with golden.raises(InternalError):
        answer(llama, [torch.tensor([5])], seeds=torch.tensor([1, 2]))
