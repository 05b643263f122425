import math

import golden
import pytest
import torch
from near import assert_near
from torch.testing import assert_close

from realsys.algorithms import logprobs as module
from realsys.algorithms.logprobs import (
    entropy,
    gather_logprobs,
    shift_to_next_token,
)
from realsys.algorithms.predictions import (
    Predictions,
    next_token_figures,
    next_token_logprobs,
)
from realsys.api.errors import ConfigError, DataError

LN3 = math.log(3.0)
QUARTERS = torch.tensor([[0.0, LN3]])  # probabilities 1/4 and 3/4


def test_logprob_is_the_log_of_the_softmax():
    logits = QUARTERS.repeat(2, 1)
    expected = torch.tensor([math.log(0.25), math.log(0.75)])
    assert_near(gather_logprobs(logits, torch.tensor([0, 1])), expected)


def test_temperature_divides_the_logits():
    # at T = 1/2 the logits are 0 and ln 9: probabilities 1/10 and 9/10
    cold = gather_logprobs(QUARTERS, torch.tensor([1]), temperature=0.5)
    assert_near(cold, torch.tensor([math.log(0.9)]))
    for temperature in (0.0, -1.0, float("nan")):
        with golden.raises(ConfigError):
            gather_logprobs(QUARTERS, torch.tensor([1]), temperature=temperature)


def test_entropy_of_known_distributions():
    assert_near(entropy(torch.zeros(1, 8)), torch.tensor([math.log(8.0)]))
    # 1/4 ln 4 + 3/4 ln 4/3 = ln 4 - 3/4 ln 3
    assert_near(entropy(QUARTERS), torch.tensor([math.log(4.0) - 0.75 * LN3]))
    # at T = 1/2: 1/10 and 9/10
    expected = -0.1 * math.log(0.1) - 0.9 * math.log(0.9)
    assert_near(entropy(QUARTERS, temperature=0.5), torch.tensor([expected]))


def test_a_token_ruled_out_adds_no_entropy():
    for temperature in (1.0, 0.5):
        logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
        h = entropy(logits, temperature=temperature)
        assert_near(h, torch.tensor([math.log(2.0)]))
        h.sum().backward()
        assert_near(logits.grad, torch.zeros(1, 3))


def test_the_gradient_of_the_entropy_is_exact_in_a_vocabulary_of_real_size():
    """Far from 0, where what is common to all logits must not matter; seen at SmolLM2: 2e-4 off."""
    torch.manual_seed(0)
    logits = (20 + 4 * torch.randn(3, 49_152)).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    entropy(logits, temperature=0.7).sum().backward()
    logp = torch.log_softmax(wide / 0.7, dim=1)
    expected = -(logp.exp() * logp).sum(dim=1)
    expected.sum().backward()
    apart = (logits.grad.double() - wide.grad).norm() / wide.grad.norm()
    assert apart < 2e-6


def test_a_gradient_of_bfloat16_logits_is_bfloat16_and_each_row_has_its_own():
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits.requires_grad_()
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5])
    (entropy(logits) * weights).sum().backward()
    wide = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(wide, dim=1)
    (-(logp.exp() * logp).sum(dim=1) * weights).sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert_close(logits.grad.double(), wide.grad, rtol=1e-2, atol=1e-3)


def test_bfloat16_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits = (4 * torch.randn(5, 300)).bfloat16()
    labels = torch.randint(300, (5,))
    expected = torch.log_softmax(logits.double() / 0.7, dim=1)[torch.arange(5), labels]
    result = gather_logprobs(logits, labels, temperature=0.7)
    assert result.dtype == torch.float32
    assert_near(result.double(), expected)


def test_chunks_change_neither_values_nor_gradients(monkeypatch):
    torch.manual_seed(0)
    labels = torch.randint(9, (7,))
    results = []
    for chunk in (2**25, 18):  # all rows at once, two at a time
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
        logits = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
        logp, h = gather_logprobs(logits, labels, temperature=0.8), entropy(logits)
        (logp.sum() + h.sum()).backward()
        results.append((logp, h, logits.grad))
    for whole, chunked in zip(*results, strict=True):
        assert torch.equal(whole, chunked)


def test_gradient_is_label_minus_probability_over_temperature():
    logits = QUARTERS.clone().requires_grad_()
    gather_logprobs(logits, torch.tensor([1]), temperature=0.5).sum().backward()
    # (0 - 0.1) / 0.5 and (1 - 0.9) / 0.5
    assert_near(logits.grad, torch.tensor([[-0.2, 0.2]]))


def test_next_token_logprobs_stand_at_the_token_they_belong_to():
    torch.manual_seed(0)
    lengths, vocab = [3, 1, 0, 2], 5
    logits, ids = torch.randn(6, vocab), torch.randint(vocab, (6,))
    result = next_token_logprobs(Predictions.of_logits(logits), ids, lengths, temperature=0.9)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            expected = torch.zeros(())
            if t > start:
                expected = torch.log_softmax(logits[t - 1] / 0.9, dim=0)[ids[t]]
            assert_near(result[t], expected)
        start += length


def test_other_sequences_do_not_leak_in():
    torch.manual_seed(0)
    logits, ids = torch.randn(5, 4, requires_grad=True), torch.randint(4, (5,))
    together = next_token_logprobs(Predictions.of_logits(logits), ids, [3, 2])
    alone = [
        next_token_logprobs(Predictions.of_logits(logits[:3]), ids[:3], [3]),
        next_token_logprobs(Predictions.of_logits(logits[3:]), ids[3:], [2]),
    ]
    assert torch.equal(together, torch.cat(alone))
    together.sum().backward()
    assert torch.equal(logits.grad[[2, 4]], torch.zeros(2, 4))  # nothing follows these


def test_a_ruled_out_label_across_a_border_gives_no_nan():
    logits = torch.zeros(3, 2)
    logits[1, 0] = -torch.inf  # the last row of the first sequence; token 0 begins the second
    logits.requires_grad_()
    result = next_token_logprobs(Predictions.of_logits(logits), torch.tensor([0, 1, 0]), [2, 1])
    assert_near(result, torch.tensor([0.0, math.log(0.5), 0.0]))
    result.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_shift_moves_values_to_the_next_token():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert shift_to_next_token(x, [3, 2]).tolist() == [0.0, 1.0, 2.0, 0.0, 4.0]
    with golden.raises(DataError):
        shift_to_next_token(x, [3, 1])


def test_labels_must_match_the_rows():
    with golden.raises(DataError):
        gather_logprobs(QUARTERS, torch.tensor([0, 1]))


def test_figures_of_each_token_are_its_logprob_and_the_entropy_it_was_drawn_from():
    logits = torch.tensor([[0.0, LN3], [0.0, 0.0], [5.0, 6.0], [LN3, 0.0], [1.0, 7.0]])
    ids = torch.tensor([0, 1, 0, 1, 1])
    given = (Predictions.of_logits(logits), ids, [3, 2])
    figures = next_token_figures(*given)
    assert torch.equal(figures[:, 0], next_token_logprobs(*given))
    quarters, halves = math.log(4.0) - 0.75 * LN3, math.log(2.0)
    wanted = [
        [0, 0],
        [math.log(0.75), quarters],
        [-halves, halves],
        [0, 0],
        [math.log(0.25), quarters],
    ]
    assert_near(figures, torch.tensor(wanted))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_ruled_out_token_has_no_probability_at_all(temperature):
    logits = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    found = gather_logprobs(logits, torch.tensor([0, 1]), temperature=temperature)
    assert found.tolist() == [0.0, -math.inf]


def test_several_labels_of_a_row_are_those_one_by_one():
    logits, labels_NK = torch.randn(5, 7), torch.tensor([[0, 6], [1, 1], [3, 2], [6, 0], [4, 5]])
    found = gather_logprobs(logits, labels_NK, temperature=0.7)
    wanted = torch.log_softmax(logits / 0.7, dim=1).gather(1, labels_NK)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
