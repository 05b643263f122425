"""The forms of a linear layer's weights: what they give, and that a row gets the same among any others."""

from functools import partial

import pytest
import torch
from near import assert_near
from torch.testing import assert_close

from realsys.generation.decoding.linear import Packed, Plain, Quantized, linear

pytestmark = pytest.mark.usefixtures("one_thread")


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", [Packed.of, Plain])
def test_exact_forms_give_the_product(form, biased):
    weight, x, to = numbers(96, 70), numbers(16, 70), numbers(16, 96)
    bias = numbers(96) if biased else None
    made = form(weight, bias)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    assert_near(made(x).double(), expected, rel=1e-4)
    assert_near(made.add(to.clone(), x).double(), to + expected, rel=1e-4)


def test_int8_is_off_by_half_a_unit_of_each_row_at_most():
    weight = numbers(700, 500)  # some blocks
    weight[3] = 0
    made = Quantized.of(weight, numbers(700), "int8")
    off = made.quantized * made.scale[:, None] - weight
    assert bool((off.abs() <= made.scale[:, None] * 0.501).all())
    largest = weight.abs().amax(dim=1)
    assert_near(made.scale * 127, largest.clamp(min=0))
    x = numbers(16, 500)
    expected = x @ (made.quantized * made.scale[:, None]).t() + numbers(700)
    assert_close(made(x), expected, atol=1e-3, rtol=0)
    assert_close(
        made.add(numbers(16, 700).clone(), x), numbers(16, 700) + expected, atol=1e-3, rtol=0
    )


def test_fp8_is_off_by_a_sixteenth_of_each_number_at_most():
    """Three bits of mantissa; below 2^-6 of its unit steps are even."""
    weight = numbers(700, 500)
    weight[3] = 0
    made = Quantized.of(weight, None, "fp8")
    kept = made.quantized.float() * made.scale[:, None]
    least = made.scale[:, None] * 2**-10
    assert bool(((kept - weight).abs() <= weight.abs() / 16 * 1.001 + least).all())
    largest = weight.abs().amax(dim=1)
    assert_near(kept.abs().amax(dim=1), largest)
    x = numbers(16, 500)
    assert_close(made(x), x @ kept.t(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "form",
    [Packed.of, Plain, partial(Quantized.of, kind="int8"), partial(Quantized.of, kind="fp8")],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gets_the_same_among_any_number_of_rows(form, threads):
    torch.set_num_threads(threads)
    try:
        made, x, to = form(numbers(200, 130), None), numbers(96, 130), numbers(96, 200)
        torch.set_num_threads(1)
        whole, added = made(x), made.add(to.clone(), x)
        torch.set_num_threads(threads)
        for num in range(8, 97, 4):
            assert torch.equal(made(x[:num]), whole[:num]), num
            assert torch.equal(made.add(to[:num].clone(), x[:num]), added[:num]), num
    finally:
        torch.set_num_threads(1)


def test_the_form_suits_size_type_and_wish():
    large, small = torch.zeros(1024, 512), torch.zeros(64, 64)
    assert Packed.can_hold(large)
    assert type(linear(large)) is Packed
    assert type(linear(small)) is Plain
    assert type(linear(large.bfloat16())) is Plain
    for kind, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        assert linear(small, quantize=kind).quantized.dtype is dtype


def test_a_weight_that_lies_askew_is_copied():
    askew = torch.zeros(64 * 64 + 1)[1:].view(64, 64)
    assert linear(askew).weight.data_ptr() % 64 == 0
    straight = torch.zeros(64, 64)
    assert linear(straight).weight is straight
