import golden
import pytest
import torch
from near import assert_near, near

from realsys.algorithms.aggregation import aggregate, aggregation_weight
from realsys.api.errors import ConfigError, DataError

MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def test_aggregation_by_hand():
    # sequences (1, 2, 3), (4, 5 masked) and one without loss tokens
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0], [6.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    weights = {m: aggregation_weight(mask, m, norm_length=5) for m in MODES}
    assert weights == {
        "token_mean": 4.0,
        "seq_mean_token_sum": 2.0,  # the empty sequence does not count
        "seq_mean_token_mean": 2.0,
        "seq_mean_token_sum_norm": 10.0,
    }
    found = [aggregate(x, mask, m, denominator=weights[m]).item() for m in MODES]
    assert found == [10 / 4, (6 + 4) / 2, (2 + 4) / 2, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_of_any_cut_add_up_to_the_batch(mode):
    """The trap: means of micro-batches averaged weigh short ones too much."""
    torch.manual_seed(0)
    lengths, num_tokens = [10, 6, 1, 3], 20
    mask, scale = torch.rand(num_tokens) > 0.2, torch.randn(num_tokens)

    def gradient(cuts):
        x = torch.ones(num_tokens, requires_grad=True)
        pieces = [slice(sum(lengths[:a]), sum(lengths[:b])) for a, b in cuts]
        weights = [
            aggregation_weight(mask[s], mode, lengths=lengths[a:b], norm_length=8)
            for s, (a, b) in zip(pieces, cuts, strict=True)
        ]
        total = 0.0
        for s, (a, b) in zip(pieces, cuts, strict=True):
            part = aggregate(
                (x * scale)[s], mask[s], mode, denominator=sum(weights), lengths=lengths[a:b]
            )
            part.backward()
            total += part.item()
        return x.grad, total

    whole, loss = gradient([(0, 4)])
    for cuts in ([(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        split, split_loss = gradient(cuts)
        assert_near(split, whole)
        assert split_loss == near(loss)


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_by_its_own_weight_then_by_its_share_is_the_same(mode):
    """What an engine does: mean over the micro-batch, times its weight, over all weights."""
    torch.manual_seed(0)
    x, lengths = torch.randn(9), [4, 5]
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1])
    cuts = [(slice(0, 4), [4]), (slice(4, 9), [5])]
    weights = [aggregation_weight(mask[s], mode, lengths=n, norm_length=6) for s, n in cuts]
    shares = [
        aggregate(x[s], mask[s], mode, denominator=w, lengths=n) * w / sum(weights)
        for (s, n), w in zip(cuts, weights, strict=True)
    ]
    whole = aggregate(x, mask, mode, denominator=sum(weights), lengths=lengths)
    assert_near(sum(shares), whole, scale=float(x.abs().max()))


def test_the_constant_length_does_not_follow_the_padding():
    mask = torch.tensor([[1, 1, 0]])
    wide = torch.tensor([[1, 1, 0, 0, 0, 0]])
    mode = "seq_mean_token_sum_norm"
    weights = [aggregation_weight(m, mode, norm_length=4) for m in (mask, wide)]
    assert weights == [4.0, 4.0]
    with golden.raises(ConfigError):
        aggregation_weight(mask, mode)


def test_rejected_tokens_can_stay_in_the_denominator():
    # two of four tokens rejected: the others weigh 1/4 each, as before
    x, kept = torch.ones(4, requires_grad=True), torch.tensor([1, 0, 1, 0])
    aggregate(x, kept, "token_mean", denominator=4.0).backward()
    assert x.grad.tolist() == [0.25, 0.0, 0.25, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_loss_tokens_has_loss_zero(mode):
    x, mask = torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2)
    weight = aggregation_weight(mask, mode, norm_length=2)
    assert weight == 0.0
    loss = aggregate(x, mask, mode, denominator=weight)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(2, 2))


def test_what_clashes_is_refused():
    x = torch.zeros(3)
    with golden.raises(ConfigError):
        aggregate(x, x, "token_men", denominator=1.0)
    with golden.raises(DataError):
        aggregate(x, x, "seq_mean_token_mean", denominator=1.0)
    with golden.raises(DataError):
        aggregation_weight(x, "seq_mean_token_sum", lengths=[2])
    with golden.raises(DataError):
        aggregate(x, x, "token_mean", denominator=-1.0)
