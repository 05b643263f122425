"""Answers that are held to a grammar: always of it, the same bits however made, exact log-probs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
import torch
from near import assert_near
from transformers import AutoModelForCausalLM, AutoTokenizer

from realsys.algorithms.kept_sets import KeptSets
from realsys.api.errors import DataError, RealsysError
from realsys.api.model import GenerationHyperparameters
from realsys.config import extras
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationOutput, GenerationRequest
from realsys.generation.engine.token_grammar import GrammarReader, grammar_fault

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["apples", "pears"]},
    },
    "required": ["answer", "why", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = "start: %json " + json.dumps(SCHEMA)
WORDS = 'start: ("yes" | "no")'
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 9},
    {"greedy": True},
    {"min_new_tokens": 40},  # a grammar that is over ends the answer all the same
)


@pytest.fixture(scope="module")
def tokenizer(tiny_policy: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_policy)


@pytest.fixture(scope="module")
def module(tiny_policy: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_policy).eval().requires_grad_(False)


def make(module: Any, tokenizer: Any, **settings: Any) -> ContinuousEngine:
    ends = () if tokenizer is None else (tokenizer.eos_token_id,)
    return ContinuousEngine(module, eos_token_ids=ends, tokenizer=tokenizer, **settings)


def request_of(number: int, grammar: str, **gconfig: Any) -> GenerationRequest:
    return GenerationRequest(
        rid=str(number),
        prompt=(5, 9, 20 + number % 7),
        gconfig=GenerationHyperparameters(**{"max_new_tokens": 120, **gconfig}),
        seed=number * 7,
        grammar=grammar,
        return_kept=True,
    )


def some_requests() -> list[GenerationRequest]:
    grammars = (JSON, "", WORDS)
    return [request_of(i, grammars[(i + i // 6) % 3], **WAYS[i % len(WAYS)]) for i in range(12)]


def answers(
    engine: ContinuousEngine, requests: Sequence[GenerationRequest], *, retract_every: int = 0
) -> dict[str, GenerationOutput]:
    for request in requests:
        engine.submit(request)
    found: dict[str, GenerationOutput] = {}
    step = 0
    while engine.num_running or engine.num_waiting:
        found |= {o.rid: o for o in engine.step() if o.finish}
        step += 1
        if retract_every and step % retract_every == 0:
            engine.retract_all()
    return found


def test_every_answer_is_of_its_grammar(module: Any, tokenizer: Any) -> None:
    requests = [request_of(i, JSON, **WAYS[i % len(WAYS)]) for i in range(30)]
    requests += [request_of(100 + i, WORDS, **WAYS[i % len(WAYS)]) for i in range(12)]
    found = answers(make(module, tokenizer), requests)
    for request in requests:
        output = found[request.rid]
        text = tokenizer.decode(output.tokens[:-1])
        assert output.finish == "stop", text
        assert output.tokens[-1] == tokenizer.eos_token_id
        if request.grammar == WORDS:
            assert text in ("yes", "no")
            continue
        value = json.loads(text)
        assert list(value) == ["answer", "why", "unit"]
        assert 0 <= value["answer"] <= 99
        assert len(value["why"]) <= 8
        assert value["unit"] in ("apples", "pears")


@pytest.mark.thorough
def test_bits_do_not_depend_on_neighbours_nor_on_being_read_anew(
    module: Any, tokenizer: Any
) -> None:
    requests = some_requests()
    alone = {r.rid: answers(make(module, tokenizer), [r])[r.rid] for r in requests}
    together = answers(make(module, tokenizer, max_running=9), requests)
    retracted = answers(make(module, tokenizer), requests, retract_every=3)
    for other in (together, retracted):
        for rid, output in alone.items():
            same = other[rid]
            assert (same.tokens, same.logprobs, same.kept) == (
                output.tokens,
                output.logprobs,
                output.kept,
            )


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 7])
def test_an_answer_in_pieces_is_the_whole_one(module: Any, tokenizer: Any, count: int) -> None:
    whole_request = request_of(4, JSON)
    whole = answers(make(module, tokenizer), [whole_request])["4"]
    tokens, logprobs, kept = list[int](), list[float](), list[bytes]()
    while not tokens or tokens[-1] != tokenizer.eos_token_id:
        piece = GenerationRequest(
            rid=str(len(tokens)),
            prompt=(*whole_request.prompt, *tokens),
            gconfig=GenerationHyperparameters(max_new_tokens=count),
            seed=whole_request.seed,
            position=len(tokens),
            grammar=JSON,
            return_kept=True,
        )
        output = answers(make(module, tokenizer), [piece])[piece.rid]
        tokens += output.tokens
        logprobs += output.logprobs
        kept += output.kept
    assert (tokens, logprobs, kept) == (whole.tokens, whole.logprobs, whole.kept)


@pytest.mark.parametrize("way", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 9}])
def test_log_probs_are_over_the_tokens_that_were_left(
    module: Any, tokenizer: Any, way: dict[str, Any]
) -> None:
    request = request_of(3, JSON, **way)
    output = answers(make(module, tokenizer), [request])["3"]
    text = torch.tensor([[*request.prompt, *output.tokens]])
    logits = module(text).logits[0, len(request.prompt) - 1 : -1].float()
    logits = logits / request.gconfig.temperature
    sets = [np.frombuffer(one, dtype="<i4") for one in output.kept]
    kept = KeptSets(
        torch.tensor([len(one) for one in sets]), torch.from_numpy(np.concatenate(sets).copy())
    ).mask(logits.shape[1])
    assert not kept.all(dim=1).any(), "the grammar leaves something out at each token"
    expected = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), dim=-1)
    picked = expected.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
    assert_near(picked, torch.tensor(output.logprobs), rel=1e-4)


def test_what_cannot_be_used_is_refused_and_leaves_nothing_behind(
    module: Any, tokenizer: Any
) -> None:
    engine = make(module, tokenizer)
    for grammar in ('start: "a', 'start: %json {"not": {}}', "start: nothing"):
        with golden.raises(DataError):
            engine.submit(request_of(1, grammar))
        assert grammar_fault(grammar)
    assert not grammar_fault(JSON)
    elsewhere = GenerationRequest(
        rid="1",
        prompt=(5, 9),
        gconfig=GenerationHyperparameters(),
        seed=0,
        position=1,
        grammar=WORDS,
    )
    with golden.raises(DataError):
        engine.submit(elsewhere)
    with golden.raises(DataError):
        ContinuousEngine(module, tokenizer=tokenizer).submit(request_of(1, WORDS))
    with golden.raises(DataError):
        make(module, None).submit(request_of(1, WORDS))
    assert (engine.num_waiting, engine.num_running) == (0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schema",
    [
        # Without an end; of more work than llguidance allows; of nothing at all.
        {
            "$defs": {
                "N": {
                    "type": "object",
                    "properties": {"n": {"$ref": "#/$defs/N"}},
                    "required": ["n"],
                }
            },
            "$ref": "#/$defs/N",
        },
        {"type": "string", "pattern": "^(.*a.{8}|.*b.{8})$", "maxLength": 40},
        {"$ref": "#"},
    ],
)
def test_a_grammar_that_breaks_fails_its_own_answer_only(
    module: Any, tokenizer: Any, schema: dict[str, Any]
) -> None:
    engine = make(module, tokenizer)
    broken = request_of(1, "start: %json " + json.dumps(schema), max_new_tokens=4000)
    try:
        engine.submit(broken)
    except DataError:
        return  # refused at once, as well
    neighbour = answers(engine, [request_of(2, JSON)])
    assert (
        neighbour["2"].tokens == answers(make(module, tokenizer), [request_of(2, JSON)])["2"].tokens
    )
    ended = neighbour.get("1")
    assert ended is not None
    # A random policy may also find an end, or come to that of the model's positions first.
    if ended.finish == "stop":
        text = json.loads(tokenizer.decode(ended.tokens[:-1]))
        assert re.fullmatch(schema["pattern"], text)
    else:
        assert (ended.finish, bool(ended.fault)) in (("abort", True), ("length", False))


def test_without_the_package_it_says_how_to_get_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with golden.raises(RealsysError) as caught:
        GrammarReader(tokenizer, vocabulary=512).read(WORDS, stop_ids=frozenset({2}))
    assert "realsys[schemas]" in caught.value.fix
