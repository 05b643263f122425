"""Counter-based randomness and the inverse-CDF draw."""

import pytest
import torch
from near import assert_near, near

from realsys.api.model import GenerationHyperparameters
from realsys.generation.engine.sampling import (
    Picking,
    Sampler,
    SlotSampler,
    encode_kept_sets,
    row_seed,
    sample,
    uniforms,
)
from realsys.generation.engine.textless_ids import textless_ids


def splitmix_mix(x: int) -> int:  # the reference, in Python's unbounded integers
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_uniforms_are_splitmix64_of_seed_and_position():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    got = uniforms(torch.tensor(seeds), 4)
    for row, seed in enumerate(seeds):
        for t in range(4):
            bits = splitmix_mix(
                splitmix_mix(seed % 2**64) + (t + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
            )
            assert got[row, t].item() == (bits >> 11) * 2.0**-53


def test_uniforms_do_not_depend_on_the_other_rows():
    alone = uniforms(torch.tensor([7]), 5)
    among = uniforms(torch.tensor([3, 7, -2]), 9)
    assert torch.equal(among[1, :5], alone[0])


def test_uniforms_of_neighbouring_seeds_and_positions_are_flat_and_unrelated():
    u = uniforms(torch.arange(1000), 100)
    counts = torch.histc(u.flatten().float(), bins=20, min=0, max=1)
    chi_square = ((counts - 5000) ** 2 / 5000).sum().item()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    standard_error = 1 / 1000**0.5
    along_seeds = torch.corrcoef(torch.stack([u[:-1, 0], u[1:, 0]]))[0, 1]
    along_positions = torch.corrcoef(torch.stack([u[:, 0], u[:, 1]]))[0, 1]
    assert abs(along_seeds) < 4 * standard_error
    assert abs(along_positions) < 4 * standard_error


def test_row_seed_depends_on_each_part_and_is_int64():
    seeds = {
        row_seed(base, name, index, version)
        for base in (1, 2, 11)
        for name in ("a", "b", "1:a")
        for index in (0, 1, 11)
        for version in (0, 1)
    }
    assert len(seeds) == 54
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_sample_follows_the_distribution():
    probs = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.2, 0.1])
    draws = 20_000
    token = sample(probs.expand(draws, -1), uniforms(torch.arange(draws), 1)[:, 0])
    counts = torch.bincount(token, minlength=6)
    assert counts[2] == 0
    expected = probs[probs > 0] * draws
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_extreme_uniforms_stay_on_possible_tokens():
    probs = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]])
    lowest, highest = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64).split(1)
    assert sample(probs, lowest).item() == 2
    assert sample(probs, highest).item() == 4
    short = probs * 0.999  # rounding left the sum below 1
    assert sample(short, highest).item() == 4
    assert sample(probs, highest, top_p=0.9).item() == 2  # sorted: 4, then 2
    assert sample(probs, highest, top_k=1).item() == 4


def test_top_k_keeps_the_first_of_equals():
    probs = torch.tensor([[0.3, 0.35, 0.35]])
    for u in (0.0, 0.6, 0.999):
        assert sample(probs, torch.tensor([u], dtype=torch.float64), top_k=1).item() == 1


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.5, 0, {0}),  # 0.5 reaches 0.5
        (0.51, 0, {0, 1}),
        (0.76, 0, {0, 1, 2}),
        (0.01, 0, {0}),  # at least one
        (1.0, 2, {0, 1}),
        (0.6, 2, {0}),  # 0.5 of the 0.75 left is 0.667
        (0.67, 2, {0, 1}),
        (1.0, 9, {0, 1, 2, 3}),  # more than there are
    ],
)
def test_top_p_and_top_k_keep_the_most_probable(top_p, top_k, kept):
    probs = torch.tensor([0.5, 0.25, 0.1875, 0.0625])
    u = torch.linspace(0, 1 - 1e-9, 500, dtype=torch.float64)
    assert set(sample(probs.expand(500, -1), u, top_p=top_p, top_k=top_k).tolist()) == kept


def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    uniform = torch.zeros(1).double()
    for settings in ({"greedy": True}, {"top_k": 1}, {"top_p": 0.1}):
        gconfig = GenerationHyperparameters(temperature=0.5, **settings)
        token, logprob = Sampler(gconfig, torch.tensor([9])).pick(logits, uniform, 0)
        assert token.item() == 1  # log(e^4 / (e^2 + e^4 + 1)) = -0.142932
        assert logprob.item() == near(-0.142932)


def test_stop_tokens_wait_for_min_new_tokens():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    sampler = Sampler(GenerationHyperparameters(greedy=True, min_new_tokens=2), torch.tensor([1]))
    picks = [sampler.pick(logits, torch.zeros(1).double(), t)[0].item() for t in range(3)]
    assert picks == [2, 2, 1]


@pytest.mark.parametrize("share", ["a part", "nearly all"])
@pytest.mark.parametrize(
    "settings", [{}, {"greedy": True}, {"top_k": 2}, {"top_p": 0.9}, {"min_new_tokens": 9}]
)
def test_ids_without_a_text_are_never_picked(settings, share):
    """By both samplers, alone and beside a row of another kind; log-probs are over all ids."""
    torch.manual_seed(3)
    logits = torch.randn(1, 8) + torch.tensor([0, 0, 0, 0, 0, 0, 2.0, 2.0])
    if share == "nearly all":  # the rest has no probability that float32 holds
        logits[0, 6:] += 300
    gconfig = GenerationHyperparameters(**settings)
    textless, every = torch.tensor([3, 6, 7]), range(400)
    sampler = Sampler(gconfig, torch.tensor([0]), textless)
    uniform = torch.tensor([i / len(every) for i in every], dtype=torch.float64)
    token, logprob = sampler.pick(logits.expand(len(every), -1), uniform, 0)
    slots = SlotSampler(torch.device("cpu"), [3, 6, 7])
    picked = [(token, logprob)]
    for others in ([], [Picking(0.5, True, 0, 1.0)]):
        slots = SlotSampler(torch.device("cpu"), [3, 6, 7])
        for slot, picking in enumerate([Picking.of(gconfig)] * 200 + others):
            slots.add(slot, picking, seed=slot, position=0)
        picked.append(slots.pick(logits.expand(200 + len(others), -1)))
    expected = torch.log_softmax(logits[0], dim=-1)
    for token, logprob in picked:
        assert not {*token.tolist()} & {3, 6, 7}
        assert_near(logprob[:200], expected[token[:200]])


def test_kept_sets_have_no_ids_without_a_text():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    slots = SlotSampler(torch.device("cpu"), [3])
    slots.add(0, Picking(1.0, False, 2, 1.0, kept=True), seed=1, position=0)
    token, logprob, sets = slots.pick_kept(logits)
    assert sets == encode_kept_sets(torch.tensor([[False, True, True, False]]))
    among = torch.log_softmax(logits[0, 1:3], dim=-1)
    assert_near(logprob[0], among[token.item() - 1])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_ids_without_a_text_alone_make_no_kept_sets(position):
    """Else each token would name all of them; log-probs are over all ids."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    every = torch.log_softmax(logits[0], dim=-1)
    gconfig = GenerationHyperparameters(min_new_tokens=1)
    sampler = Sampler(gconfig, torch.tensor([0]), torch.tensor([3]))
    uniform = torch.tensor([0.7], dtype=torch.float64)
    token, logprob, sets = sampler.pick_kept(logits, uniform, position)
    assert token.item() in (1, 2)
    if position == 0:
        assert sets == encode_kept_sets(torch.tensor([[False, True, True, False]]))
        return
    assert sets == [b""]
    assert_near(logprob[0], every[token.item()])
    slots = SlotSampler(torch.device("cpu"), [3])
    slots.add(0, Picking(1.0, False, 0, 1.0, kept=True), seed=1, position=position)
    token, logprob, sets = slots.pick_kept(logits)
    assert sets is None
    assert_near(logprob[0], every[token.item()])


def test_textless_ids_are_beyond_the_tokenizer_or_in_its_gaps():
    class Words:
        def get_vocab(self):  # without a token of half a letter
            return {"a": 0, "b": 1, "c": 4}

        def convert_ids_to_tokens(self, i):
            return {0: "a", 1: "b", 3: "\ufffd", 4: "c"}.get(i)

        def __len__(self):
            return 5

    assert textless_ids(Words(), vocabulary=7, ends=[]) == [2, 5, 6]
    assert textless_ids(Words(), vocabulary=7, ends=[6]) == [2, 5]
    assert textless_ids(Words(), vocabulary=2, ends=[]) == []
    assert textless_ids(None, vocabulary=7, ends=[]) == []


def test_a_token_that_float32_gives_no_probability_has_its_log_prob_all_the_same():
    """Where what is likely is banned: both samplers, alone and beside a row without a ban."""
    logits = torch.tensor([[400.0, 0.0, -50.0], [1.0, 2.0, 3.0]])
    gconfig = GenerationHyperparameters(max_new_tokens=4, min_new_tokens=4, greedy=True)
    sampler = Sampler(gconfig, torch.tensor([0]))
    token, expected = sampler.pick(logits[:1], torch.tensor([0.5], dtype=torch.float64), 0)
    assert (token.item(), expected.item()) == (1, -400.0)
    for rows, others in ((1, []), (2, [Picking.of(gconfig)]), (2, [Picking(0.5, False, 0, 1.0)])):
        slots = SlotSampler(torch.device("cpu"))
        for slot, picking in enumerate([Picking.of(gconfig), *others]):
            slots.add(slot, picking, seed=slot, position=0)
        banned = torch.zeros(rows, 3, dtype=torch.bool)
        banned[0, 0] = True
        token, logprob = slots.pick(logits[:rows], banned=banned)
        assert (token[0].item(), logprob[0].item()) == (1, -400.0)
        assert logprob.isfinite().all()
