"""The cache of keys and values stays within its bound, whoever runs, and answers don't notice."""

import golden
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from near import near
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from realsys.api.data import MicroBatchSpec
from realsys.api.errors import ConfigError
from realsys.api.model import (
    GenerationHyperparameters,
    ModelInterfaceType,
    ProcessTopology,
)
from realsys.backends.hf.local_engine import _cache_tokens
from realsys.generation.decoding.attention import KeyValues
from realsys.generation.decoding.cache_shapes import grown_size
from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.generation.engine.cache_room import needs_of, room_on_gpu, tokens_that_fit
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.embedded_engine import generate
from realsys.generation.engine.engine_requests import GenerationRequest
from realsys.generation.served_engines import embedded
from realsys.generation.served_engines.embedded import EmbeddedEngine
from realsys.models.shape import shape_of
from realsys.planner.memory.copy_memory import (
    HeldModel,
    StepSizes,
    bytes_of_generation,
    call_terms,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 40
# While the cache changes one of the four layers is there twice; positions are whole lines of 16.
ABOVE = 1.25 * 1.02


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def request_of(rid, num_tokens, prompt=(5, 6, 7)):
    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    return GenerationRequest(rid=rid, prompt=tuple(prompt), gconfig=gconfig, seed=len(rid))


def finished(engine):
    found = {}
    while engine.num_running or engine.num_waiting:
        found.update({o.rid: (o.tokens, o.logprobs) for o in engine.step() if o.finish})
    return found


@pytest.fixture
def most_cells(monkeypatch):
    """Rows times positions of the running rows' cache at most, what is there twice while it changes too."""
    found = [0.0]
    make, resize = KeyValues._of_a_layer, KeyValues.resize
    changing = []

    def made(self, num_rows, width):
        new = make(self, num_rows, width)
        if self in changing:
            there = [*self.keys, *self.values, *self.tensors, *new]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in there}
            of_a_cell = 2 * len(self.keys) * self._lanes.num_lanes * self._lanes.width * 4
            found[0] = max(found[0], sum(storages.values()) / of_a_cell)
        return new

    def resized(self, num_rows, width):
        changing.append(self)
        resize(self, num_rows, width)
        changing.remove(self)
        found[0] = max(found[0], num_rows * width)

    monkeypatch.setattr(KeyValues, "_of_a_layer", made)
    monkeypatch.setattr(KeyValues, "resize", resized)
    return found


@pytest.mark.thorough
def test_short_rows_and_then_long_ones(module, most_cells):
    """64 rows of 64 tokens made 64 rows of the three long ones' width: 10 times the bound."""
    engine = ContinuousEngine(module, max_tokens=2048)
    for i in range(32):
        engine.submit(request_of(f"short {i}", 61))
    first = finished(engine)
    for i in range(3):
        engine.submit(request_of(f"long {i}", 509))
    most_running = 0
    second = {}
    while engine.num_waiting or engine.num_running:
        second.update({o.rid: (o.tokens, o.logprobs) for o in engine.step() if o.finish})
        most_running = max(most_running, engine.num_running)
    assert most_running == 3
    assert most_cells[0] <= ABOVE * 2048
    free = ContinuousEngine(module)
    for i in range(3):
        free.submit(request_of(f"long {i}", 509))
    assert finished(free) == second
    assert {len(tokens) for tokens, _ in first.values()} == {61}


@pytest.mark.thorough
def test_one_call_of_long_rows(module, most_cells):
    """16 rows made twice the cells that they needed, and nearly three times as many while it grew."""
    prompts = [torch.tensor([5, 6, 7 + i % 9]) for i in range(16)]
    settings = {"eos_token_ids": [], "pad_token_id": 0, "row_seeds": torch.arange(16)}
    gconfig = GenerationHyperparameters(max_new_tokens=253)
    bounded = generate(module, prompts, gconfig, max_tokens=2048, **settings)
    assert most_cells[0] <= ABOVE * 2048
    most_cells[0] = 0
    free = generate(module, prompts, gconfig, **settings)
    assert 16 * 256 <= most_cells[0] <= ABOVE * 16 * (256 + 64), "not twice of it either"
    assert all(map(torch.equal, bounded.tokens, free.tokens))
    assert all(map(torch.equal, bounded.logprobs, free.logprobs))


@pytest.mark.thorough
def test_rows_are_admitted_by_what_they_hold_and_the_newest_make_room(module):
    """By the longest that each could get, 2000 tokens had room for one row at a time."""
    engine = ContinuousEngine(module, max_tokens=2000)
    for i in range(12):
        engine.submit(request_of(f"row {i}", 1900))
    engine.step()
    assert engine.num_running == 12
    engine.abort_all()

    engine = ContinuousEngine(module, max_tokens=300)
    for i in range(3):
        engine.submit(request_of(f"row {i}", 150, (5, 6, 7 + i)))
    running, found = [], {}
    while engine.num_running or engine.num_waiting:
        found.update({o.rid: (o.tokens, o.logprobs) for o in engine.step() if o.finish})
        running.append(engine.num_running)
    assert running[0] == 3
    assert min(running[:-1]) < 3
    free = ContinuousEngine(module)
    for i in range(3):
        free.submit(request_of(f"row {i}", 150, (5, 6, 7 + i)))
    assert finished(free) == found


def test_a_row_longer_than_the_bound_runs_alone(module):
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    found = generate(
        module,
        prompts,
        GenerationHyperparameters(max_new_tokens=20),
        eos_token_ids=[],
        pad_token_id=0,
        row_seeds=torch.arange(2),
        max_tokens=10,
    )
    assert [len(x) for x in found.tokens] == [20, 20]


shapes = st.tuples(st.integers(0, 100), st.integers(0, 190).map(lambda n: 16 * n))


@given(shapes, st.tuples(st.integers(1, 100), st.integers(1, 3000)), st.integers(1, 100_000))
def test_a_cache_grows_to_what_is_needed_and_no_further_than_it_may(have, need, most):
    rows, width = grown_size(
        have, need, most_rows=100, granule=8, least_rows=2, max_entries=max(most, need[0] * need[1])
    )
    assert rows >= need[0]
    assert width >= need[1]
    if (rows, width) != have:
        assert width % 16 == 0
        assert rows * width <= max(most, need[0] * need[1]) + max(2, need[0]) * 15 + need[1]


# ---- on a GPU ------------------------------------------------------------------------------------

GiB = 1 << 30
# Qwen2.5-7B in bfloat16.
SEVEN_BILLION = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)


def test_a_gpu_keeps_as_many_tokens_as_its_free_memory_holds():
    """The trainer's micro-batch of 16 384 tokens was one row at a time of 9000 tokens each."""
    needs = needs_of(SEVEN_BILLION, 2)
    assert needs.token == 57_344
    assert needs.row == 152_064 * 10
    found = tokens_that_fit(64 * GiB, needs, num_rows=512)
    assert found > 100 * 9000
    taken = found * needs.token * (1 + 1 / 28) + needs.reading(8192, 4 * 8192) + 512 * needs.row
    assert 0.91 * 64 * GiB < taken <= 0.92 * 64 * GiB
    weights = 15 * GiB
    less = tokens_that_fit(64 * GiB, needs, num_rows=512, kept=weights)
    assert (found - less) * needs.token * (1 + 1 / 28) == near(weights, rel=1e-4)
    assert tokens_that_fit(GiB, needs, num_rows=512) == 1, "one row is tried all the same"


def test_the_question_to_a_gpu(module, monkeypatch):
    """What torch keeps of freed memory is free, too."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GiB, 2 * GiB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GiB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GiB)
    needs = needs_of(module.config, 4)
    assert room_on_gpu(module, num_rows=9) == tokens_that_fit(4 * GiB, needs, num_rows=9)


def test_whose_bound_it_is(module):
    both = MicroBatchSpec(max_tokens_per_mb=7, max_cache_tokens=9)
    assert _cache_tokens(module, both, 3) == 9
    assert _cache_tokens(module, MicroBatchSpec(max_tokens_per_mb=7), 3) == 7
    assert _cache_tokens(module, None, 3) is None
    with golden.raises(ConfigError):
        MicroBatchSpec(max_cache_tokens=0)


def test_a_server_on_a_gpu_leaves_room_for_the_weights_that_come(module, monkeypatch):
    asked, found = [], [9999]

    def room(module, *, num_rows, kept):
        asked.append((num_rows, kept))
        return found[0]

    monkeypatch.setattr(embedded, "room_on_gpu", room)
    module = module.float()
    weights = sum(4 * p.numel() for p in module.parameters())

    def bound(max_tokens, *, on_gpu):
        settings = EmbeddedSettings(max_tokens=max_tokens, max_running=5, prefix_bytes=1000)
        server = EmbeddedEngine(
            module, eos_token_ids=(), pad_token_id=0, settings=settings, fetch=None
        )
        monkeypatch.setattr(embedded, "_on_gpu", lambda module: on_gpu)
        return server._max_tokens()

    assert bound(None, on_gpu=False) is None
    assert bound(99, on_gpu=True) == 99
    asked.clear()
    assert bound(None, on_gpu=True) == 9999
    assert set(asked) == {(5, weights + 1000)}
    found[0] = 1
    with golden.raises(ConfigError):
        bound(None, on_gpu=True)


def test_the_planner_counts_what_the_engine_does():
    """One formula of token, row and reading for the engine's loaded model and the planner's shape."""
    plain = {
        "model_type": "qwen2",
        "hidden_size": SEVEN_BILLION.hidden_size,
        "intermediate_size": SEVEN_BILLION.intermediate_size,
        "num_hidden_layers": SEVEN_BILLION.num_hidden_layers,
        "num_attention_heads": SEVEN_BILLION.num_attention_heads,
        "num_key_value_heads": SEVEN_BILLION.num_key_value_heads,
        "vocab_size": SEVEN_BILLION.vocab_size,
    }
    shape = shape_of(plain)
    engine = needs_of(SEVEN_BILLION, 2)
    assert bytes_of_generation(shape, 2) == engine
    model = HeldModel(shape=shape, dtype="bfloat16", backend="inference", max_cache_tokens=9216)
    sizes = StepSizes(sequences=512, prompt_tokens=1024, answer_tokens=8192)
    terms = call_terms(model, ProcessTopology(), 0, ModelInterfaceType.GENERATE, sizes)
    assert terms["cache"] == 9216 * engine.cached_token
    assert terms["reading prompts"] == engine.reading(8192, 8192)
    assert terms["logits"] == engine.logits(8)  # so many prompts of 1024 begin at once
