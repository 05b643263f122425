"""Linear layers by oneDNN: what comes out and its gradients are those of torch's own."""

import copy

import pytest
import torch
from near import assert_near
from torch import nn
from torch.testing import assert_close

from realsys.backends.kernels import cpu_linear
from realsys.backends.kernels.cpu_linear import multiply_by_onednn

ROWS = 300


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer(inputs, outputs, *, biased=False):
    made = nn.Linear(inputs, outputs, bias=biased)
    with torch.no_grad():
        for x in made.parameters():
            x.copy_(numbers(*x.shape))
    return made


def results(module, x):
    """Output, and gradients of input and weights."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(numbers(*y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.fixture
def products(monkeypatch):
    """The shapes multiplied by oneDNN."""
    seen = []
    before = cpu_linear.onednn_product

    def times(x, weight, bias=None):
        seen.append((tuple(x.shape), tuple(weight.shape)))
        return before(x, weight, bias)

    monkeypatch.setattr(cpu_linear, "onednn_product", times)
    return seen


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 160), (160, 48), (1, 7)])
def test_results_are_those_of_exact_arithmetic(inputs, outputs, biased, products):
    quick = layer(inputs, outputs, biased=biased)
    exact = copy.deepcopy(quick).double()
    multiply_by_onednn(quick)
    x = numbers(2, ROWS // 2, inputs)
    for found, expected in zip(results(quick, x), results(exact, x.double()), strict=True):
        assert_close(found.double(), expected, atol=1e-3, rtol=1e-4)
    forward, backward = products
    assert forward == ((ROWS, inputs), (outputs, inputs))
    assert backward == ((ROWS, outputs), (inputs, outputs))


def test_a_gradient_that_was_spread_out_is_taken_too():
    """The gradient of a sum is one number seen everywhere."""
    quick = layer(48, 160)
    multiply_by_onednn(quick)
    x = numbers(ROWS, 48).requires_grad_()
    quick(x).sum().backward()
    assert_near(x.grad, quick.weight.detach().sum(0).expand(ROWS, -1), rel=1e-4)


def test_frozen_weights_get_no_gradient(products):
    quick = layer(48, 160).requires_grad_(False)
    multiply_by_onednn(quick)
    x = numbers(ROWS, 48).requires_grad_()
    quick(x).backward(numbers(ROWS, 160))
    assert_near(x.grad, numbers(ROWS, 160) @ quick.weight, rel=1e-4)
    assert quick.weight.grad is None
    assert len(products) == 2


def test_an_input_that_needs_no_gradient_gets_none(products):
    quick = layer(48, 160)
    multiply_by_onednn(quick)
    quick(numbers(ROWS, 48)).backward(numbers(ROWS, 160))
    assert_near(quick.weight.grad, numbers(ROWS, 160).t() @ numbers(ROWS, 48), rel=1e-4)
    assert len(products) == 1


@pytest.mark.parametrize(
    ("x", "dtype"),
    [(numbers(8, 48), torch.float32), (numbers(ROWS, 48), torch.bfloat16)],
    ids=["few rows", "bfloat16"],
)
def test_others_are_left_to_torch(x, dtype, products):
    plain = layer(48, 160).to(dtype)
    quick = copy.deepcopy(plain)
    multiply_by_onednn(quick)
    assert torch.equal(quick(x.to(dtype)), plain(x.to(dtype)))
    assert products == []


@torch.no_grad()
def test_modules_stay_what_they_were_and_copies_have_weights_of_their_own():
    module = nn.Sequential(layer(48, 160), nn.SiLU(), layer(160, 48))
    names = list(module.state_dict())
    multiply_by_onednn(module)
    assert [type(part) for part in module] == [nn.Linear, nn.SiLU, nn.Linear]
    assert list(module.state_dict()) == names
    other = copy.deepcopy(module)
    other[0].weight.zero_()
    other[2].weight.zero_()
    assert float(other(numbers(ROWS, 48)).abs().max()) == 0
    assert float(module(numbers(ROWS, 48)).abs().max()) > 0


def test_a_torch_without_the_operators_multiplies_as_ever(monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn", lambda: None)
    quick = layer(48, 160)
    plain = copy.deepcopy(quick)
    multiply_by_onednn(quick)
    assert torch.equal(quick(numbers(ROWS, 48)), plain(numbers(ROWS, 48)))
