"""Long texts are read in pieces: others go on between them, and nothing of an answer changes."""

import asyncio
from dataclasses import replace

import pytest
import torch
from near import near
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from realsys.api.model import GenerationHyperparameters
from realsys.generation.decoding.decoder import FastForward
from realsys.generation.decoding.generic_decoder import GenericDecoder, continues_texts
from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationRequest
from realsys.generation.engine.long_texts import piece_size
from realsys.generation.served_engines.embedded import EmbeddedEngine
from realsys.transport.generation_messages import GenerateRequest, PauseMode, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, MOST = 40, 16
LONG = tuple(3 + i * i % 31 for i in range(150))
SHORT = (5, 6, 7)


def llama():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def gpt2():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


@pytest.fixture(params=[llama, gpt2])
def module(request):
    return request.param()


def request_of(rid, prompt, **gconfig):
    return GenerationRequest(
        rid=rid,
        prompt=prompt,
        gconfig=GenerationHyperparameters(**{"max_new_tokens": 4, **gconfig}),
        seed=len(prompt),
    )


def finished(engine):
    found = {}
    while engine.num_running or engine.num_waiting:
        found.update({o.rid: o for o in engine.step() if o.finish})
    return found


@pytest.fixture
def forwards(module, monkeypatch):
    """Tokens of each forward pass of the model, padding included."""
    sizes = []

    def counted(real):
        def counting(self, tokens, *args, **kwargs):
            sizes.append(tokens.numel())
            return real(self, tokens, *args, **kwargs)

        return counting

    for kind, name in ((FastForward, "run"), (GenericDecoder, "_forward")):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    return sizes


def test_a_short_request_waits_for_one_piece(module, forwards):
    engine = ContinuousEngine(module, read_tokens=MOST, prefix_bytes=0)
    engine.submit(request_of("long", LONG))
    assert engine.step() == []
    engine.submit(request_of("short", SHORT, max_new_tokens=3))
    steps = [[o.rid for o in engine.step()] for _ in range(5)]
    assert steps == [["short"], [], ["short"], [], ["short"]]
    assert max(forwards) <= MOST
    assert sorted(finished(engine)) == ["long"]
    assert max(forwards) <= MOST


def test_all_of_a_long_text_is_read_once(module, forwards):
    engine = ContinuousEngine(module, read_tokens=MOST, prefix_bytes=0)
    engine.submit(request_of("long", LONG, max_new_tokens=1))
    assert finished(engine)["long"].finish == "length"
    assert len(LONG) <= sum(forwards) < len(LONG) + 10


def test_answers_are_those_of_texts_read_whole(module):
    requests = [request_of("a", LONG * 2), request_of("b", SHORT), request_of("c", LONG[:90])]
    made = []
    for read_tokens in (None, MOST, 100):
        engine = ContinuousEngine(module, read_tokens=read_tokens)
        for request in requests:
            engine.submit(request)
        made.append(finished(engine))
    whole, *in_pieces = made
    for pieces in in_pieces:
        for rid, output in pieces.items():
            assert output.tokens == whole[rid].tokens
            assert output.logprobs == near(whole[rid].logprobs)
            if isinstance(module, LlamaForCausalLM):
                assert output.logprobs == whole[rid].logprobs


def test_tokens_of_a_long_text_are_the_same_read_or_sampled():
    module, prompt = llama(), LONG * 2
    whole = ContinuousEngine(module, prefix_bytes=0)
    whole.submit(request_of("whole", prompt, max_new_tokens=8))
    output = finished(whole)["whole"]
    for cut in (1, 5):
        engine = ContinuousEngine(module, prefix_bytes=0, read_tokens=100)
        asked = request_of("rest", (*prompt, *output.tokens[:cut]), max_new_tokens=8 - cut)
        engine.submit(replace(asked, seed=len(prompt), position=cut))
        rest = finished(engine)["rest"]
        assert (rest.tokens, rest.logprobs) == (output.tokens[cut:], output.logprobs[cut:])


def test_several_long_texts_are_read_one_by_one_and_short_ones_pass(module):
    engine = ContinuousEngine(module, read_tokens=MOST, prefix_bytes=0, max_running=2)
    for i in range(3):
        engine.submit(request_of(f"long {i}", (i, *LONG)))
    engine.submit(request_of("short", SHORT, max_new_tokens=1))
    assert [o.rid for o in engine.step()] == ["short"]
    assert (engine.num_running, engine.num_waiting, engine.num_long) == (0, 3, 3)
    ended = []
    while engine.num_waiting or engine.num_running:
        ended += [o.rid for o in engine.step() if o.finish]
    assert ended == ["long 0", "long 1", "long 2"]


@pytest.mark.parametrize("module", [llama], indirect=True)
def test_answers_to_the_same_long_text_read_it_once(module, forwards):
    engine = ContinuousEngine(module, read_tokens=MOST, prefix_bytes=0)
    for i in range(4):
        engine.submit(request_of(str(i), LONG, max_new_tokens=1))
    engine.submit(request_of("other", LONG[1:], max_new_tokens=1))
    assert len({tuple(o.tokens) for rid, o in finished(engine).items() if rid != "other"}) == 1
    assert sum(forwards) < 2 * len(LONG) + 20
    assert engine.slots._partial is None


def test_of_equal_texts_some_are_aborted(module):
    for num_steps in (3, 10, 11):
        engine = ContinuousEngine(module, read_tokens=MOST, prefix_bytes=0, max_running=1)
        for i in range(3):
            engine.submit(request_of(str(i), LONG))
        for _ in range(num_steps):
            engine.step()
        engine.abort("0")
        engine.abort("2")
        assert sorted(finished(engine)) == ["1"]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 10])
def test_work_ends_when_a_long_request_is_aborted(module, forwards, num_steps):
    engine = ContinuousEngine(module, read_tokens=MOST)
    engine.submit(request_of("long", LONG))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("long")
    assert (output.finish, output.tokens) == ("abort", [])
    forwards.clear()
    assert engine.step() == []
    assert (engine.num_waiting, engine.num_tokens, forwards) == (0, 0, [])
    assert engine.slots._partial is None
    engine.submit(request_of("next", SHORT))
    assert len(engine.step()) == 1


def test_a_client_that_leaves_before_the_first_token_ends_the_reading():
    async def main():
        settings = EmbeddedSettings(read_tokens=MOST, prefix_bytes=0)
        engine = EmbeddedEngine(
            llama(), eos_token_ids=(), pad_token_id=0, settings=settings, fetch=None
        )
        await engine.start()
        for num_pieces in (0, 3):
            await engine.pause(PauseMode.IN_PLACE)
            request = GenerateRequest(rid="a", input_ids=LONG, sampling=Sampling(max_new_tokens=9))
            answers = engine.generate(request, stream=False)
            first = asyncio.create_task(anext(answers))
            while not await engine._call(lambda own: own.num_waiting):
                await asyncio.sleep(0)
            await engine._call(lambda own, n=num_pieces: [own.step() for _ in range(n)])
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await engine.resume()
            counts = await engine._call(lambda own: (own.num_waiting, own.num_tokens))
            assert (counts, engine.counters.progress) == ((0, 0), 0)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_all_are_aborted_and_read_anew_after_a_retraction(module, num_steps):
    engine = ContinuousEngine(module, read_tokens=MOST)
    whole = ContinuousEngine(module)
    whole.submit(request_of("long", LONG))
    engine.submit(request_of("long", LONG))
    for _ in range(num_steps):
        engine.step()
    engine.retract_all()
    assert finished(engine)["long"].tokens == finished(whole)["long"].tokens
    engine.submit(request_of("again", LONG[1:]))
    engine.step()
    assert [o.rid for o in engine.abort_all()] == ["again"]
    assert engine.num_waiting == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_in_the_middle_of_a_text(recompute):
    module = llama()
    engine = ContinuousEngine(module, read_tokens=MOST)
    engine.submit(request_of("long", LONG, max_new_tokens=2))
    for _ in range(3):
        engine.step()
    for parameter in module.parameters():
        parameter.mul_(1.1)
    engine.set_version(1, recompute=recompute)
    output = finished(engine)["long"]
    assert output.versions == [1, 1]
    fresh = ContinuousEngine(module, version=1)
    fresh.submit(request_of("long", LONG, max_new_tokens=2))
    expected = finished(fresh)["long"].logprobs
    assert (output.logprobs == expected) is recompute
    # What several versions have read is never the beginning of another text.
    engine.submit(request_of("next", LONG, max_new_tokens=2))
    assert finished(engine)["next"].logprobs == expected


@pytest.mark.parametrize("module", [llama], indirect=True)
def test_a_known_beginning_is_not_read_again(module, forwards):
    engine = ContinuousEngine(module, read_tokens=MOST)
    engine.submit(request_of("first", LONG[:100], max_new_tokens=1))
    finished(engine)
    forwards.clear()
    engine.submit(request_of("second", LONG, max_new_tokens=1))
    assert finished(engine)["second"].cached_tokens == 100
    assert len(LONG) - 100 <= sum(forwards) < len(LONG) - 100 + 10


def test_the_text_of_a_recurrent_model_is_read_whole(monkeypatch, module):
    """Its code takes up what it keeps for one token at a time."""
    assert continues_texts(module)
    monkeypatch.setattr(type(module), "_is_stateful", True, raising=False)
    assert not continues_texts(module)
    monkeypatch.setattr(type(module), "_is_stateful", False)
    monkeypatch.setattr(module.config, "layer_types", ["linear_attention"], raising=False)
    assert not continues_texts(module)


def test_a_piece_is_at_most_a_twentieth_of_the_time():
    for num_tokens in (12_000, 20_000, 40_000, 130_000):
        size = piece_size(num_tokens, 1024)
        assert size / num_tokens <= 1 / 20
        last = num_tokens**2 - (num_tokens - size) ** 2  # pairs of tokens
        assert last / num_tokens**2 <= 1 / 20
    assert [piece_size(1000, 7), piece_size(1, 1024)] == [7, 256]
