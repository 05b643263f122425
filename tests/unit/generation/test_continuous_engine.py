"""Who runs, how answers end, and what weights made each token."""

import math

import golden
import pytest
import torch
from near import near
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from realsys.api.errors import DataError, InternalError
from realsys.api.model import GenerationHyperparameters
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationRequest

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 40


def llama(seed=1, scale=10):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.mul_(scale)
    return module


def gpt2():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=128)
    return GPT2LMHeadModel(config).train().requires_grad_(False)  # with dropout


@pytest.fixture(params=[llama, gpt2])
def module(request):
    return request.param()


def request_of(rid, prompt=(5, 6, 7), *, seed=0, position=0, stop_ids=(), stop_texts=(), **gconfig):
    return GenerationRequest(
        rid=rid,
        prompt=tuple(prompt),
        gconfig=GenerationHyperparameters(**{"max_new_tokens": 6, **gconfig}),
        seed=seed,
        position=position,
        stop_ids=frozenset(stop_ids),
        stop_texts=tuple(stop_texts),
    )


def finished(engine):
    found = {}
    while engine.num_running or engine.num_waiting:
        found.update({o.rid: o for o in engine.step() if o.finish})
    return found


def logprobs_by_forward(module, prompt, tokens, temperature=1.0):
    ids = torch.tensor([[*prompt, *tokens]])
    logits = module.eval()(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_logprobs_are_those_of_a_full_forward_whatever_the_settings(module):
    engine = ContinuousEngine(module)
    ways = [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"greedy": True}]
    for i, way in enumerate(ways):
        engine.submit(request_of(str(i), (5, 6 + i), seed=i, **way))
    for rid, output in finished(engine).items():
        way = ways[int(rid)]
        expected = logprobs_by_forward(
            module, (5, 6 + int(rid)), output.tokens, way.get("temperature", 1.0)
        )
        assert output.logprobs == near(expected)
        if way.get("greedy"):
            assert min(output.logprobs) > -math.log(VOCABULARY)


def test_each_row_is_picked_in_its_own_way_as_if_all_were_alike(module):
    """Settings that differ go through vectors, equal ones do not: the same tokens."""
    ways = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6, "temperature": 0.7}]
    ways.append({"greedy": True})
    mixed = ContinuousEngine(module)
    for i, way in enumerate(ways):
        mixed.submit(request_of(str(i), seed=i, **way))
    together = finished(mixed)
    for i, way in enumerate(ways):
        engine = ContinuousEngine(module)
        engine.submit(request_of(str(i), seed=i, **way))
        assert finished(engine)[str(i)].tokens == together[str(i)].tokens


def test_first_come_first_served_up_to_max_running(module):
    engine = ContinuousEngine(module, max_running=2)
    for rid in "abcd":
        engine.submit(request_of(rid, max_new_tokens=1 if rid == "a" else 3))
    assert [o.rid for o in engine.step()] == ["a", "b"]
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    assert [o.rid for o in engine.step()] == ["b", "c"]
    assert engine.num_tokens == (3 + 2) + (3 + 1) + 3
    assert sorted(finished(engine)) == ["b", "c", "d"]
    assert engine.step() == []


def test_max_tokens_bounds_the_rectangle_of_the_cache(module):
    engine = ContinuousEngine(module, max_tokens=30)
    for rid in "abcd":
        engine.submit(request_of(rid, max_new_tokens=7))  # ten cells each
    engine.step()
    assert engine.num_running == 3
    with golden.raises(DataError):
        engine.submit(request_of("e", prompt=(5,) * 30, max_new_tokens=1))
    engine.submit(request_of("long", max_new_tokens=28))  # one more than there is room for
    outputs = finished(engine)
    assert {len(outputs[rid].tokens) for rid in "abcd"} == {7}
    assert len(outputs["long"].tokens) == 27
    assert outputs["long"].finish == "length"


def test_answers_end_with_any_of_their_stop_tokens(module):
    free = ContinuousEngine(module)
    free.submit(request_of("x", max_new_tokens=20))
    tokens = finished(free)["x"].tokens
    for where in ("engine", "request", "gconfig"):
        stop = tokens[4]
        engine = ContinuousEngine(module, eos_token_ids=[stop] if where == "engine" else [])
        engine.submit(
            request_of(
                "x",
                max_new_tokens=20,
                stop_ids=[stop] if where == "request" else [],
                stop_token_ids=(stop,) if where == "gconfig" else (),
            )
        )
        output = finished(engine)["x"]
        assert output.finish == "stop"
        assert output.tokens == tokens[: tokens.index(stop) + 1]


def test_min_new_tokens_holds_off_stop_tokens_of_that_row_alone(module):
    engine = ContinuousEngine(module, eos_token_ids=range(3, 40))  # nearly everything ends
    engine.submit(request_of("patient", max_new_tokens=20, min_new_tokens=5))
    engine.submit(request_of("hasty", max_new_tokens=20))
    outputs = finished(engine)
    assert len(outputs["patient"].tokens) > 5
    assert set(outputs["patient"].tokens[:5]) <= {0, 1, 2}
    assert len(outputs["hasty"].tokens) < len(outputs["patient"].tokens)
    expected = logprobs_by_forward(module, (5, 6, 7), outputs["patient"].tokens)
    assert outputs["patient"].logprobs == near(expected)  # of the whole


def test_each_row_is_held_off_as_long_as_it_asks_whoever_comes_and_goes(module):
    engine = ContinuousEngine(module, eos_token_ids=range(1, VOCABULARY))  # all but token 0 end it
    arrivals = {0: (4, 9, 3), 1: (6,), 5: (1, 3)}
    wanted, outputs, step = {}, {}, 0
    while len(outputs) < 6:
        for least in arrivals.get(step, ()):
            rid = f"{step}-{least}"
            wanted[rid] = least
            engine.submit(request_of(rid, seed=least, max_new_tokens=30, min_new_tokens=least))
        outputs.update({o.rid: o for o in engine.step() if o.finish})
        step += 1
    for rid, output in outputs.items():
        assert output.tokens[: wanted[rid]] == [0] * wanted[rid]
        assert output.finish == "stop", "held off for longer than it asked"


def test_an_aborted_row_is_not_held_off_any_more(module):
    engine = ContinuousEngine(module, eos_token_ids=range(1, VOCABULARY))
    for rid in "ab":
        engine.submit(request_of(rid, max_new_tokens=9, min_new_tokens=9))
    engine.step()
    engine.abort("b")
    assert finished(engine)["a"].tokens == [0] * 9


class Letters:
    """A tokenizer of tokens a, b, … as letters; token 1 spells the two letters "xy"."""

    def decode(self, tokens, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join("xy" if t == 1 else chr(97 + t % 26) for t in tokens)


def test_a_stop_text_may_straddle_tokens_and_requests(module):
    free = ContinuousEngine(module)
    free.submit(request_of("x", max_new_tokens=12))
    tokens = finished(free)["x"].tokens
    text = Letters().decode(tokens[4:7], skip_special_tokens=False)
    end = next(
        n for n in range(1, 13) if text in Letters().decode(tokens[:n], skip_special_tokens=False)
    )
    engine = ContinuousEngine(module, tokenizer=Letters())
    engine.submit(request_of("whole", max_new_tokens=12, stop_texts=[text, "never"]))
    cut = end - 1
    prompt = (5, 6, 7, *tokens[:cut])
    engine.submit(request_of("rest", prompt, position=cut, stop_texts=[text]))
    outputs = finished(engine)
    assert (outputs["whole"].tokens, outputs["whole"].finish) == (tokens[:end], "stop")
    assert (outputs["rest"].tokens, outputs["rest"].finish) == (tokens[cut:end], "stop")
    # What the prompt says does not end an answer.
    engine.submit(request_of("prompt", prompt, stop_texts=[text], max_new_tokens=1))
    assert finished(engine)["prompt"].finish == "length"


def test_an_aborted_request_gives_what_it_has(module):
    engine = ContinuousEngine(module, max_running=2)
    for rid in "abc":
        engine.submit(request_of(rid, seed=ord(rid)))
    engine.step()
    engine.step()
    aborted = engine.abort("a")
    assert (aborted.finish, len(aborted.tokens), len(aborted.logprobs)) == ("abort", 2, 2)
    assert engine.abort("a") is None
    assert engine.abort("c").tokens == []
    assert (engine.num_running, engine.num_waiting) == (1, 0)
    engine.submit(request_of("d"))
    engine.step()
    assert [(o.rid, o.finish) for o in engine.abort_all()] == [("b", "abort"), ("d", "abort")]
    assert (engine.num_running, engine.num_waiting, engine.num_tokens) == (0, 0, 0)


def test_an_output_can_be_asked_for_and_is_a_copy(module):
    engine = ContinuousEngine(module)
    engine.submit(request_of("a"))
    assert engine.output("a").tokens == []
    (live,) = engine.step()
    copy = engine.output("a")
    engine.step()
    assert (len(copy.tokens), len(live.tokens)) == (1, 2)
    assert engine.output("nobody") is None


def test_retracted_requests_go_on_before_those_that_wait(module):
    engine = ContinuousEngine(module, max_running=2)
    for rid in "abc":
        engine.submit(request_of(rid))
    engine.step()
    engine.retract_all()
    assert (engine.num_running, engine.num_waiting) == (0, 3)
    assert [(o.rid, len(o.tokens)) for o in engine.step()] == [("a", 2), ("b", 2)]


def test_new_weights_are_used_and_every_token_tells_its_version():
    module, other = llama(1), llama(2)
    engine = ContinuousEngine(module, version=3)
    engine.submit(request_of("a"))
    engine.step()
    engine.step()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.copy_(theirs)
    engine.set_version(4)
    output = finished(engine)["a"]
    assert output.versions == [3, 3, 4, 4, 4, 4]
    # Read anew: as if the new weights had been there for prompt and tokens so far.
    expected = logprobs_by_forward(other, (5, 6, 7), output.tokens)
    assert output.logprobs[2:] == near(expected[2:])
    engine.submit(request_of("a"))  # no prefix of the old weights is used
    again = finished(engine)["a"]
    assert again.cached_tokens == 0
    assert again.logprobs == near(logprobs_by_forward(other, (5, 6, 7), again.tokens))


def test_running_requests_may_keep_what_the_old_weights_cached():
    module, other = llama(1), llama(2)
    engine = ContinuousEngine(module)
    engine.submit(request_of("a"))
    engine.step()
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.copy_(theirs)
    engine.set_version(1, recompute=False)
    assert engine.num_running == 1
    output = finished(engine)["a"]
    assert output.versions == [0, 1, 1, 1, 1, 1]
    anew = logprobs_by_forward(other, (5, 6, 7), output.tokens)
    assert output.logprobs[1] != pytest.approx(anew[1], abs=1e-3)
    # Nor does such a row serve as a prefix of later requests.
    engine.submit(request_of("b", (5, 6, 7, *output.tokens)))
    assert finished(engine)["b"].cached_tokens == 0


def test_equal_prompts_are_read_once():
    engine = ContinuousEngine(llama(), max_running=3)
    for i in range(5):
        engine.submit(request_of(str(i), seed=i))
    engine.submit(request_of("longer", (5, 6, 7, 8)))
    outputs = finished(engine)
    assert [outputs[str(i)].cached_tokens for i in range(5)] == [0, 3, 3, 3, 3]
    assert outputs["longer"].cached_tokens == 3
    engine.flush_prefixes()
    engine.submit(request_of("flushed"))
    assert finished(engine)["flushed"].cached_tokens == 0


def test_an_answer_that_is_gone_on_with_is_not_read_again():
    engine = ContinuousEngine(llama())
    engine.submit(request_of("a"))
    first = finished(engine)["a"]
    engine.submit(request_of("b", (5, 6, 7, *first.tokens), position=6))
    assert finished(engine)["b"].cached_tokens == 3 + 6 - 1  # the last token was never read
    forgetful = ContinuousEngine(llama(), keep_answers=False)
    forgetful.submit(request_of("a"))
    finished(forgetful)
    forgetful.submit(request_of("b", (5, 6, 7, *first.tokens), position=6))
    assert finished(forgetful)["b"].cached_tokens == 3


@pytest.mark.parametrize(
    "request_",
    [
        request_of("x", ()),
        request_of("x", (1, 40)),
        request_of("x", (-1,)),
        request_of("x", (5,) * 128),
        request_of("x", position=4),
        request_of("x", stop_texts=["."]),
        request_of("here"),
    ],
)
def test_impossible_requests_are_refused_and_change_nothing(module, request_):
    engine = ContinuousEngine(module)
    engine.submit(request_of("here"))
    with golden.raises(DataError):
        engine.submit(request_)
    assert engine.num_waiting == 1


def test_weights_that_are_not_numbers_say_so(module):
    for parameter in module.parameters():
        parameter.fill_(float("nan"))
    engine = ContinuousEngine(module, version=7)
    engine.submit(request_of("a"))
    with golden.raises(InternalError):
        engine.step()


def test_dropout_is_off_and_the_mode_is_put_back():
    module = gpt2()
    engine = ContinuousEngine(module)
    engine.submit(request_of("a"))
    output = finished(engine)["a"]
    assert module.training
    expected = logprobs_by_forward(module, (5, 6, 7), output.tokens)
    assert output.logprobs == near(expected)


@pytest.mark.parametrize(("kind", "mean", "most"), [("int8", 0.02, 0.1), ("fp8", 0.08, 0.4)])
def test_weights_of_eight_bits_change_logprobs_a_little(kind, mean, most):
    module = llama(scale=4)
    prompts = [(5 + i, 6, 7) for i in range(8)]
    off = []
    engine = ContinuousEngine(module, quantize=kind)
    for i, prompt in enumerate(prompts):
        engine.submit(request_of(str(i), prompt, seed=i))
    for rid, output in finished(engine).items():
        exact = logprobs_by_forward(module, prompts[int(rid)], output.tokens)
        off += [abs(a - b) for a, b in zip(output.logprobs, exact, strict=True)]
    assert 0 < sum(off) / len(off) < mean
    assert max(off) < most
    with golden.raises(DataError):
        ContinuousEngine(gpt2(), quantize=kind)


def test_texts_are_read_a_bounded_part_a_step_and_those_that_run_go_on(module):
    """After new weights all running texts were read anew in one step: no token came, for minutes."""
    engine = ContinuousEngine(module, read_tokens=9, prefix_bytes=0)
    for i, rid in enumerate("abcd"):
        engine.submit(request_of(rid, (5, 6, 7 + i), max_new_tokens=9))
    assert [o.rid for o in engine.step()] == ["a", "b", "c"], "three tokens each"
    assert [o.rid for o in engine.step()] == ["a", "b", "c", "d"]
    engine.set_version(1)
    lengths = []
    while engine.num_waiting:
        lengths.append([len(o.tokens) for o in engine.step()])
    # Five tokens of a, five of b, five of c, four of d: one, as two are ten; then c and d.
    assert lengths == [[3], [4, 3], [5, 4, 3, 2]]
    slow = finished(engine)
    whole = ContinuousEngine(module, prefix_bytes=0)
    for i, rid in enumerate("abcd"):
        whole.submit(request_of(rid, (5, 6, 7 + i), max_new_tokens=9))
    assert {rid: o.tokens for rid, o in finished(whole).items()} == {
        rid: o.tokens for rid, o in slow.items()
    }


def test_equal_texts_and_known_beginnings_cost_nothing_of_the_bound():
    engine = ContinuousEngine(llama(), read_tokens=4)
    for i in range(5):
        engine.submit(request_of(str(i), seed=i, max_new_tokens=2))
    assert len(engine.step()) == 5
    finished(engine)
    engine.submit(request_of("one more", (5, 6, 7, 8)))
    engine.submit(request_of("and more", (5, 6, 7, 9)))
    assert len(engine.step()) == 2


def test_prefixes_hold_no_more_memory_than_their_bound():
    """Those read together were views of one piece of memory: one of them kept it whole."""
    most = 40_000
    engine = ContinuousEngine(llama(), max_running=6, prefix_bytes=most)
    for turn in range(4):
        for i in range(6):
            engine.submit(request_of(f"{turn} {i}", (turn, i, *range(2, 9)), max_new_tokens=4))
        engine.submit(request_of(f"back {turn}", (0, 3, *range(2, 9)), max_new_tokens=2))
        finished(engine)
    prefixes = engine.slots.prefixes
    kept = [entry.kept for entry in prefixes._entries.values()]
    tensors = [x for k in kept for x in (*k.tensors, *([] if k.logits is None else [k.logits]))]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    assert len(kept) > 3
    assert sum(storages.values()) == prefixes.num_bytes <= most
