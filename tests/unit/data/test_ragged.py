import golden
import pytest
import torch
from torch.testing import assert_close

from realsys.api.errors import DataError
from realsys.data.ragged import length_mask, pad_packed, unpad_to_packed

PACKED = torch.tensor([1, 2, 3, 4, 5, 6])
LENGTHS = [3, 0, 1, 2]


def test_padding_goes_to_the_side_asked_for():
    right = [[1, 2, 3], [9, 9, 9], [4, 9, 9], [5, 6, 9]]
    left = [[1, 2, 3], [9, 9, 9], [9, 9, 4], [9, 5, 6]]
    assert pad_packed(PACKED, LENGTHS, value=9).tolist() == right
    assert pad_packed(PACKED, LENGTHS, value=9, side="left").tolist() == left


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float64]
)
def test_unpadding_gives_back_the_very_rows(side, dtype):
    x = torch.arange(12).reshape(6, 2).to(dtype)
    padded = pad_packed(x, LENGTHS, side=side)
    assert padded.shape == (4, 3, 2)
    back = unpad_to_packed(padded, LENGTHS, side=side)
    assert back.dtype == dtype
    assert torch.equal(back, x)


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpadding_takes_a_wider_rectangle(side):
    wide = length_mask(LENGTHS, width=5, side=side)
    x_BT = torch.zeros(4, 5, dtype=torch.int64).masked_scatter(wide, PACKED)
    assert unpad_to_packed(x_BT, LENGTHS, side=side).tolist() == PACKED.tolist()


def test_integers_beyond_float_precision_survive():
    x = torch.tensor([2**53 + 1, -(2**62) - 1])
    assert pad_packed(x, [1, 1]).tolist() == [[2**53 + 1], [-(2**62) - 1]]


def test_gradient_reaches_each_packed_row_once():
    x = torch.arange(6.0, requires_grad=True)
    weight_BT = torch.arange(12.0).reshape(4, 3)
    (pad_packed(x, LENGTHS) * weight_BT).sum().backward()
    # rows of the rectangle: 0 1 2 | - - - | 6 - - | 9 10 -
    assert_close(x.grad, torch.tensor([0.0, 1.0, 2.0, 6.0, 9.0, 10.0]))


def test_an_empty_batch_pads_to_nothing():
    assert pad_packed(torch.zeros(0), []).shape == (0, 0)
    assert pad_packed(torch.zeros(0, 2), [0, 0]).shape == (2, 0, 2)


def test_lengths_must_fit_the_rows():
    with golden.raises(DataError):
        pad_packed(PACKED, [3, 2])
    with golden.raises(DataError):
        unpad_to_packed(torch.zeros(4, 2), LENGTHS)
    with pytest.raises(DataError, match="0 sequences of up to 0"):
        unpad_to_packed(torch.zeros(1, 2), [])
