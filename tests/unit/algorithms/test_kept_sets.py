"""Log-probs and entropies over kept sets, against a naive loop."""

import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms import predictions as predictions_module
from realsys.algorithms.kept_sets import KeptSets
from realsys.algorithms.predictions import Predictions, next_token_logprobs
from realsys.api.errors import DataError
from realsys.data.answers_layout import KEPT_BITS

VOCAB, WIDTH = 12, 5
# Of seven tokens: sets kept, sets left out, everything.
SETS = [[1, 4, 5], [], [~2], [0, 11], [~0, ~7, ~8], [3], []]
TOKENS = torch.tensor([4, 9, 1, 0, 3, 3, 7])


def kept_of(sets):
    ids = torch.tensor([i for entries in sets for i in entries], dtype=torch.int32)
    return KeptSets(torch.tensor([len(entries) for entries in sets], dtype=torch.int32), ids)


def members(entries):
    if not entries or entries[0] < 0:
        return [i for i in range(VOCAB) if ~i not in entries]
    return entries


def naive(logits, temperature):
    """Log-prob and entropy of each row, over its own set alone."""
    found = []
    for row, token, entries in zip(logits, TOKENS.tolist(), SETS, strict=True):
        own = members(entries)
        log_p = (row[own] / temperature).log_softmax(-1)
        found.append((log_p[own.index(token)], -(log_p.exp() * log_p).sum()))
    return [torch.stack(column) for column in zip(*found, strict=True)]


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(7, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(WIDTH, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    return states, head


def test_the_mask_is_true_on_the_members_of_each_set():
    mask = kept_of(SETS).mask(VOCAB)
    assert [row.nonzero().flatten().tolist() for row in mask] == [members(s) for s in SETS]


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([1, 4, 13], [1, 4]),
        ([~2, ~12, ~15], [0, 1, *range(3, VOCAB)]),
        ([KEPT_BITS, 1 << 3 | 1 << 11 | 1 << 20], [3, 11]),
        ([~12], list(range(VOCAB))),
    ],
)
def test_padding_rows_of_the_sampler_are_not_those_of_a_model_with_fewer(entries, kept):
    (row,) = kept_of([entries]).mask(VOCAB)
    assert row.nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("rows_at_once", [100, 3, 1])
def test_log_probs_entropies_and_gradients_are_those_of_a_naive_loop(
    parts, rows_at_once, monkeypatch
):
    """Chunks of rows too. Log-probs are float32 as everywhere; so compared in float32's precision."""
    monkeypatch.setattr(predictions_module, "logits_at_once", lambda vocab_size: rows_at_once)
    states, head = parts
    predictions = Predictions(states, lambda x: x @ head, vocab_size=VOCAB)
    logprob, entropy = predictions.logprobs_and_entropy(
        TOKENS, temperature=0.7, train_entropy=True, kept=kept_of(SETS)
    )
    expected, expected_entropy = naive(states @ head, 0.7)
    assert_near(logprob.double(), expected)
    assert_near(entropy.double(), expected_entropy)
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    for mine, theirs in ((logprob, expected), (entropy, expected_entropy)):
        found = torch.autograd.grad((mine * weights).sum(), parts, retain_graph=True)
        wanted = torch.autograd.grad((theirs * weights).sum(), parts, retain_graph=True)
        assert_near(found, wanted)


def test_the_gradient_of_limited_log_probs_is_exact_in_float64(parts):
    """The mask alone, without the float32 of log-probs: autograd against finite differences."""
    states, head = parts
    kept = kept_of(SETS)

    def logprob(states, head):
        limited = kept.limit(states @ head / 0.7)
        return limited.gather(1, TOKENS[:, None])[:, 0] - limited.logsumexp(1)

    torch.testing.assert_close(
        logprob(states, head), naive(states @ head, 0.7)[0], atol=1e-12, rtol=0
    )
    assert torch.autograd.gradcheck(logprob, (states, head))


def test_a_set_of_one_has_log_prob_and_entropy_0_and_no_gradient(parts):
    states, head = parts
    predictions = Predictions(states[:1], lambda x: x @ head, vocab_size=VOCAB)
    logprob, entropy = predictions.logprobs_and_entropy(
        torch.tensor([3]), train_entropy=True, kept=kept_of([[3]])
    )
    assert (logprob.item(), entropy.item()) == (0.0, 0.0)
    for grad in torch.autograd.grad((logprob + entropy).sum(), parts):
        assert not grad.any()


def test_empty_sets_are_the_whole_vocabulary_to_the_bit(parts):
    states, head = parts
    predictions = Predictions(states, lambda x: x @ head, vocab_size=VOCAB)
    empty = kept_of([[]] * 7)
    for mine, plain in zip(
        predictions.logprobs_and_entropy(TOKENS, kept=empty),
        predictions.logprobs_and_entropy(TOKENS),
        strict=True,
    ):
        assert torch.equal(mine, plain)


def test_sets_are_selected_by_index_and_by_mask_and_split():
    kept = kept_of(SETS)

    def listed(sets):
        return [part.tolist() for part in torch.split(sets.ids_K, sets.counts_R.tolist())]

    assert listed(kept.take(torch.tensor([5, 0, 1, 0]))) == [SETS[i] for i in (5, 0, 1, 0)]
    mask = torch.tensor([False, True, True, False, True, False, False])
    assert listed(kept.take(mask)) == [SETS[i] for i in (1, 2, 4)]
    assert [listed(part) for part in kept.split(3)] == [SETS[:3], SETS[3:6], SETS[6:]]
    assert listed(kept.take(mask & False)) == []


def test_next_token_log_probs_use_the_set_of_the_predicted_token(parts):
    states, head = parts
    logits = (states @ head).detach()
    tokens = torch.tensor([9, 4, 9, 2, 0])
    sets = [[], SETS[0], SETS[1], [], SETS[3]]  # the first of each sequence is a prompt's
    found = next_token_logprobs(
        Predictions.of_logits(logits[:5]), tokens, [3, 2], kept=kept_of(sets)
    )
    assert found[0] == found[3] == 0
    for t in (1, 2, 4):
        own = members(sets[t])
        expected = logits[t - 1][own].log_softmax(-1)[own.index(tokens[t].item())]
        assert found[t].item() == near(expected.item())


def test_counts_that_do_not_fit_are_refused():
    with golden.raises(DataError):
        KeptSets(torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32))


# ---- what this is for: exact sums over a small vocabulary --------------------------------------


@pytest.mark.parametrize("own", [[1, 4, 5], list(range(6))])
def test_a_score_that_is_the_same_for_every_token_has_no_gradient(own):
    """Σ p(a) ∇ log p(a) over the set that is sampled from: over the whole vocabulary it is not 0."""
    logits = torch.linspace(-1, 1, VOCAB, dtype=torch.float64).sin().requires_grad_()
    sampled = logits.detach()[own].softmax(-1)
    tokens = torch.tensor(own)

    def expected_gradient(kept):
        rows = logits.expand(len(own), VOCAB)
        logprob = Predictions.of_logits(rows).logprobs(tokens, kept=kept)
        return torch.autograd.grad((sampled * logprob).sum(), logits)[0]

    exact, biased = expected_gradient(kept_of([own] * len(own))), expected_gradient(None)
    assert exact.abs().max() < 1e-7
    assert biased.abs().max() > 0.02


def test_the_mean_ratio_of_a_policy_that_has_moved_is_1():
    """Σ p_old(a) · p_new(a) / p_old(a): the ratio is one of densities over the sampled set."""
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)
    own = [1, 4, 5, 8]
    sampled, tokens = old[own].softmax(-1), torch.tensor(own)

    def mean_ratio(kept):
        of = [
            Predictions.of_logits(x.expand(len(own), VOCAB)).logprobs(tokens, kept=kept)
            for x in (new, old)
        ]
        return (sampled * (of[0] - of[1]).exp()).sum().item()

    assert mean_ratio(kept_of([own] * len(own))) == near(1)
    assert abs(mean_ratio(None) - 1) > 0.1
