"""Kept sets of samplers: what a token was drawn from, and its log-prob over that."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from near import assert_near, near

from realsys.algorithms.kept_sets import KeptSets
from realsys.api.model import GenerationHyperparameters
from realsys.data.answers_layout import KEPT_BITS
from realsys.generation.engine.sampling import (
    Picking,
    Sampler,
    SlotSampler,
    encode_kept_sets,
    sample,
    uniforms,
)

VOCAB = 40
SETTINGS = [
    {"top_p": 0.9},
    {"top_k": 7},
    {"top_p": 0.7, "top_k": 12},
    {"top_p": 0.999},  # most are kept: those left out are listed
    {"min_new_tokens": 2},
    {"min_new_tokens": 2, "top_p": 0.8},
]
STOPS = torch.tensor([3, 11])


def naive_kept(probs: np.ndarray, top_p: float, top_k: int) -> set[int]:
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[:top_k] if top_k else order
    total, kept, before = sum(probs[i] for i in order), set(), 0.0
    for i in order:
        if before < total * top_p or top_p == 1:
            kept.add(i)
        before += probs[i]
    return kept


def naive(logits: torch.Tensor, token: int, gconfig: GenerationHyperparameters, position: int):
    """The kept set, and the token's log-prob over it, in float64 for one row."""
    scaled = logits.double() / gconfig.temperature
    if position < gconfig.min_new_tokens:
        scaled[STOPS] = -torch.inf
    probs = scaled.softmax(-1).numpy()
    kept = naive_kept(probs, gconfig.top_p, gconfig.top_k) - {
        i for i in range(VOCAB) if probs[i] == 0
    }
    return kept, (scaled[token] - scaled[sorted(kept)].logsumexp(-1)).item()


def decoded(code: bytes) -> set[int]:
    ids = np.frombuffer(code, dtype="<i4").tolist()
    if ids and ids[0] == KEPT_BITS:
        assert len(ids) == 3
        return {i for i in range(VOCAB) if ids[1 + i // 32] >> i % 32 & 1}
    if not ids or ids[0] < 0:
        return set(range(VOCAB)) - {~i for i in ids}
    assert ids == sorted(ids)
    return set(ids)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("position", [0, 5])
def test_log_probs_are_those_of_a_naive_softmax_over_the_kept_set(settings, position):
    gconfig = GenerationHyperparameters(max_new_tokens=9, temperature=0.8, **settings)
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, VOCAB, generator=generator)
    uniform = uniforms(torch.arange(64), 1)[:, 0]
    token, logprob, kept = Sampler(gconfig, STOPS).pick_kept(logits, uniform, position)
    for row in range(64):
        expected, log_p = naive(logits[row], token[row].item(), gconfig, position)
        assert decoded(kept[row]) == expected
        assert token[row].item() in expected
        assert logprob[row].item() == near(log_p)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_tokens_are_drawn_with_and_without_kept_sets(settings):
    gconfig = GenerationHyperparameters(max_new_tokens=9, **settings)
    logits = 2 * torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2))
    uniform = uniforms(torch.arange(64), 1)[:, 0]
    sampler = Sampler(gconfig, STOPS)
    alone, _ = sampler.pick(logits, uniform, 0)
    assert torch.equal(alone, sampler.pick_kept(logits, uniform, 0)[0])


def slot_rows(settings, logits, banned):
    """Tokens, log-probs and kept sets of rows with these settings, picked together."""
    slots = SlotSampler(torch.device("cpu"))
    for slot, (gconfig, kept) in enumerate(settings):
        slots.add(slot, Picking.of(gconfig, kept=kept), seed=slot, position=0)
    return slots.pick_kept(logits, banned)


@pytest.mark.parametrize("num", [1, 2, 6])
def test_rows_of_different_settings_have_the_log_probs_and_sets_that_they_have_alone(num):
    of = [GenerationHyperparameters(max_new_tokens=9, **s) for s in SETTINGS[:num]]
    of += [GenerationHyperparameters(top_p=0.5), GenerationHyperparameters(greedy=True)]
    wants = [True] * num + [False, True]
    logits = 3 * torch.randn(len(of), VOCAB, generator=torch.Generator().manual_seed(3))
    banned = torch.zeros(len(of), VOCAB, dtype=torch.bool)
    for i, gconfig in enumerate(of):
        banned[i, STOPS] = bool(gconfig.min_new_tokens)
    token, logprob, kept = slot_rows(
        list(zip(of, wants, strict=True)), logits, banned if banned.any() else None
    )
    for i, gconfig in enumerate(of):
        if wants[i] and not gconfig.greedy:
            expected, log_p = naive(logits[i], token[i].item(), gconfig, 0)
            assert decoded(kept[i]) == expected
            assert logprob[i].item() == near(log_p)
        else:
            assert kept[i] == b""
            whole = logits[i].log_softmax(-1)[token[i]]
            assert logprob[i].item() == near(whole.item())


def test_rows_that_keep_everything_cost_and_change_nothing():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    plain = GenerationHyperparameters()
    token, logprob, kept = slot_rows([(plain, True)] * 3, logits, None)
    again, log_p, _ = slot_rows([(plain, False)] * 3, logits, None)
    assert kept is None
    assert torch.equal(token, again)
    assert torch.equal(logprob, log_p)


def test_without_a_request_for_sets_log_probs_stay_over_the_whole_vocabulary():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    token, logprob, kept = slot_rows(
        [(GenerationHyperparameters(top_p=0.5), False)] * 3, logits, None
    )
    assert kept is None
    assert_near(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])


def test_the_shortest_of_three_forms_is_encoded():
    kept = torch.ones(4, 9, dtype=torch.bool)
    kept[0, [2, 5]] = False
    kept[1] = False
    kept[1, 4] = True
    kept[3, :5] = False
    found = [np.frombuffer(code, dtype="<i4").tolist() for code in encode_kept_sets(kept)]
    assert found == [[~2, ~5], [4], [], [KEPT_BITS, 0b111100000]]


@given(st.integers(1, 100), st.floats(0, 1), st.integers(0, 99))
def test_the_trainer_reads_what_the_sampler_wrote(vocab, share, seed):
    generator = torch.Generator().manual_seed(seed)
    kept = (
        torch.rand(5, vocab, generator=generator) < torch.tensor([0, 0.1, share, 0.95, 1])[:, None]
    )
    kept[0, seed % vocab] = True
    kept[1, seed % vocab] = True
    kept[2, seed % vocab] = True
    sets = encode_kept_sets(kept)
    assert all(len(code) <= 4 * (1 + -(-vocab // 32)) for code in sets)
    ids = torch.from_numpy(np.frombuffer(bytearray(b"".join(sets)), dtype="<i4"))
    counts = torch.tensor([len(code) // 4 for code in sets], dtype=torch.int32)
    whole = KeptSets(counts, ids)
    assert torch.equal(whole.mask(vocab), kept)
    rows = torch.tensor([4, 2, 2, 0])
    assert torch.equal(whole.take(rows).mask(vocab), kept[rows])


def test_a_token_too_improbable_to_be_drawn_is_not_kept():
    probs = torch.tensor([[1.0, 1e-20, 0.0]])
    sampled = sample(probs, torch.tensor([1 - 2.0**-53], dtype=torch.float64), top_k=3)
    assert sampled.item() == 0
    logits = torch.tensor([[0.0, -46.0, -200.0]])
    sampler = Sampler(GenerationHyperparameters(top_k=3), STOPS[:0])
    _, logprob, kept = sampler.pick_kept(logits, torch.zeros(1).double(), 0)
    assert (logprob.item(), kept) == (0.0, [np.array([0], "<i4").tobytes()])
