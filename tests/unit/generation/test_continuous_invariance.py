"""Tokens and log-probs of a request are its own, bit for bit: who else runs, and when, changes nothing.

Held for models with a fast path, in float32 on a CPU. The generic way computes each row alone, so there
it holds by itself but for re-reading, and is not tested here.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from realsys.api.model import GenerationHyperparameters
from realsys.generation.decoding.attention import Lanes, seen_width
from realsys.generation.decoding.decoder import rounded, row_granule
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.embedded_engine import generate
from realsys.generation.engine.engine_requests import GenerationRequest

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 61
# (hidden, MLP, query heads, key heads): lanes of one, two and four key heads, and odd widths.
SHAPES = {"grouped": (32, 50, 8, 2), "pairs": (32, 48, 4, 2), "alone": (24, 40, 4, 4)}


def build(name):
    torch.manual_seed(3)
    hidden, mlp, heads, kv_heads = SHAPES[name]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
    }
    if name == "alone":
        module = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
    else:
        module = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if "norm" not in key:
                parameter.mul_(8)
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=list(SHAPES))
def module(request):
    return build(request.param)


def request_of(i, prompt, **gconfig):
    return GenerationRequest(
        rid=str(i), prompt=tuple(prompt), gconfig=GenerationHyperparameters(**gconfig), seed=i * 7
    )


def some_requests():
    """Prompts of one token to many, two of them twice; different settings."""
    draw = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, VOCABULARY, (n,), generator=draw).tolist()
        for n in (1, 2, 7, 16, 17, 33, 150)
    ]
    ways = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 9}, {"greedy": True}]
    return [
        request_of(i, prompt, max_new_tokens=(1, 9, 20, 40)[i % 4], **ways[i % 5])
        for i, prompt in enumerate([*prompts, prompts[2], prompts[4]])
    ]


def answers(engine, requests, arrivals=None):
    """Tokens and log-probs by rid; request i comes before step ``arrivals[i]``."""
    due = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    found, step = {}, 0
    while due or engine.num_running or engine.num_waiting:
        while due and due[0][0] <= step:
            engine.submit(requests[due.pop(0)[1]])
        found.update({o.rid: (o.tokens, o.logprobs) for o in engine.step() if o.finish})
        step += 1
    return found


def alone(module, requests):
    found = {}
    for request in requests:
        found.update(answers(ContinuousEngine(module, max_running=1), [request]))
    return found


@pytest.fixture(scope="module")
def expected(module):
    return alone(module, some_requests())


@pytest.mark.thorough
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    arrivals=st.lists(st.integers(0, 30), min_size=9, max_size=9),
    max_running=st.sampled_from([3, 1, 2, 9, 30]),  # the first example has the first of each
    prefix_bytes=st.sampled_from([30_000, 0, 1 << 20]),
    max_tokens=st.sampled_from([250, None, 500]),
    read_tokens=st.sampled_from([30, None, 100]),
)
def test_whoever_else_runs_and_whenever_they_come(
    module, expected, arrivals, max_running, prefix_bytes, max_tokens, read_tokens
):
    engine = ContinuousEngine(
        module,
        max_running=max_running,
        prefix_bytes=prefix_bytes,
        max_tokens=max_tokens,
        read_tokens=read_tokens,
    )
    assert answers(engine, some_requests(), arrivals) == expected


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    prefix_bytes=st.sampled_from([1 << 20, 0]),
)
def test_in_one_request_or_in_several(module, cuts, prefix_bytes):
    prompt, num = (5, 9, 3), 24
    whole = answers(ContinuousEngine(module), [request_of(1, prompt, max_new_tokens=num)])["1"]
    engine = ContinuousEngine(module, prefix_bytes=prefix_bytes)
    tokens, logprobs = [], []
    for size in [*cuts, num]:
        left = num - len(tokens)
        if left:
            request = GenerationRequest(
                rid="x",
                prompt=(*prompt, *tokens),
                gconfig=GenerationHyperparameters(max_new_tokens=min(size, left)),
                seed=7,
                position=len(tokens),
            )
            more = answers(engine, [request])["x"]
            tokens, logprobs = tokens + more[0], logprobs + more[1]
    assert (tokens, logprobs) == whole


@pytest.mark.thorough
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    retract_before=st.sets(st.integers(1, 39), min_size=1, max_size=4),
    read_tokens=st.sampled_from([1, None, 30]),
)
def test_however_often_retracted(module, expected, retract_before, read_tokens):
    engine = ContinuousEngine(module, max_running=4, read_tokens=read_tokens)
    for request in some_requests():
        engine.submit(request)
    found = {}
    for step in range(1000):
        if step in retract_before:
            engine.retract_all()
            assert engine.num_running == 0
        found.update({o.rid: (o.tokens, o.logprobs) for o in engine.step() if o.finish})
        if not engine.num_waiting and not engine.num_running:
            break
    assert found == expected


def test_however_rows_are_put_in_order(module, monkeypatch):
    """A few long rows among many short ones: moved together, and computed in bands of their own."""
    long = [request_of(i, [7 + i] * 120, max_new_tokens=40) for i in range(0, 40, 8)]
    short = [request_of(i, [7 + i % 50, i % 3], max_new_tokens=9) for i in range(40) if i % 8]
    requests = sorted([*long, *short], key=lambda request: int(request.rid))
    engine = ContinuousEngine(module, max_running=40)
    orders, arrange = [], engine.slots.arrange
    monkeypatch.setattr(
        engine.slots, "arrange", lambda order: (orders.append(order), arrange(order))
    )
    together = answers(engine, requests)
    assert any(len(order) == 40 and order != sorted(order) for order in orders)
    for request in (*long[:2], *short[:5]):
        assert alone(module, [request])[request.rid] == together[request.rid]


def test_with_one_thread_or_two(module, expected):
    torch.set_num_threads(2)
    try:
        assert row_granule() == 8
        assert answers(ContinuousEngine(module), some_requests()) == expected
    finally:
        torch.set_num_threads(1)


def test_inside_a_trainer_as_at_a_server(module):
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9] * 20), torch.tensor([5, 6, 7])]
    result = generate(
        module,
        prompts,
        GenerationHyperparameters(max_new_tokens=12),
        eos_token_ids=(2,),
        pad_token_id=0,
        row_seeds=torch.tensor([0, 7, 14]),
        max_batch=2,
    )
    engine = ContinuousEngine(module, eos_token_ids=(2,))
    requests = [request_of(i, p.tolist(), max_new_tokens=12) for i, p in enumerate(prompts)]
    served = answers(engine, requests)
    for i in range(3):
        assert result.tokens[i].tolist() == served[str(i)][0]
        assert result.logprobs[i].tolist() == served[str(i)][1]


# ---- what kernels do, as decoder.py relies on it ---------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 24), (32, 96), (128, 256), (384, 128)])
def test_a_row_of_a_product_is_the_same_among_any_number_of_rows(inputs, outputs):
    x, weight = torch.randn(128, inputs), torch.randn(outputs, inputs)
    whole = x @ weight.t()
    for num in range(rounded(1, row_granule()), 129, 4):
        assert torch.equal(x[:num] @ weight.t(), whole[:num]), num


@pytest.mark.parametrize("size", [8, 32, 96])
@pytest.mark.parametrize("length", [1, 11, 19, 107, 130, 187, 235, 257])
def test_a_longer_cache_adds_zeros(length, size):
    queries, keys, values = (
        torch.randn(6, 4, size),
        torch.randn(6, size, 512),
        torch.randn(6, 512, size),
    )

    def seen(width):
        mask = torch.zeros(6, 4, width)
        mask[:, :, length:] = -torch.inf
        return Lanes(4, 1, size).attend(queries, keys[:, :, :width], values[:, :width], mask)

    alone = seen(seen_width(length))
    for width in {seen_width(num) for num in range(length, 513)}:
        assert torch.equal(seen(width), alone), width


def test_at_most_fifteen_positions_are_looked_at_for_nothing():
    assert all(0 <= seen_width(num) - num < 16 for num in range(1, 2000))
    assert [seen_width(num) for num in (1, 16, 17, 128, 129, 145)] == [16, 16, 24, 128, 144, 152]


@pytest.mark.thorough
@pytest.mark.parametrize(("threads", "bounds"), [(2, (250, 700)), (8, (250,))])
def test_in_a_tight_cache_of_fewer_rows_than_the_matrices_have(module, expected, threads, bounds):
    """A cache within its bound has no rows for padding, but one matrix for each thread."""
    torch.set_num_threads(threads)
    try:
        # Of two threads the test above says that they are as expected
        free = expected if threads == 2 else answers(ContinuousEngine(module), some_requests())
        for max_tokens in bounds:
            engine = ContinuousEngine(module, max_tokens=max_tokens)
            assert answers(engine, some_requests()) == free
    finally:
        torch.set_num_threads(1)
