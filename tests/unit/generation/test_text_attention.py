"""Texts are attended to block by block, with the bits of ``Lanes.attend``."""

import pytest
import torch

from realsys.generation.decoding import text_attention
from realsys.generation.decoding.attention import KeyValues, Lanes, seen_width
from realsys.generation.decoding.text_attention import TextAttention

# (query heads, key heads, head size): lanes that part, lanes that don't, one head for all
SHAPES = [(4, 2, 8), (9, 3, 16), (4, 4, 24), (14, 2, 16), (2, 2, 112), (8, 1, 16)]


def rows_of(lanes, begins, length):
    """A cache whose rows hold ``begins[i] + length`` tokens, and the queries of the last ``length``."""
    draw = torch.Generator().manual_seed(1)
    width = seen_width(max(begins) + length)
    cache = KeyValues(lanes, 1, len(begins), width, torch.zeros(1))
    positions = torch.tensor(begins)[:, None] + torch.arange(length)
    for row, begin in enumerate(begins):
        for x in cache.tensors:
            x[row, :, : begin + length].normal_(generator=draw)
    heads = lanes.num_lanes * lanes.shared * lanes.group
    q = torch.randn(len(begins) * length, heads, lanes.head_dim, generator=draw)
    return cache, positions, q


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("begins", "length"), [([0], 272), ([300, 41], 64), ([3, 0, 250], 32)])
def test_bits_are_those_of_all_rows_together(
    monkeypatch, one_thread, threads, shape, begins, length
):
    lanes = Lanes(*shape)
    cache, positions, q = rows_of(lanes, begins, length)
    mask = lanes.mask(positions, cache.width, torch.float32)
    whole = lanes.attend(lanes.queries(q, length), cache.keys[0], cache.values[0], mask)
    expected = lanes.outputs(whole, length)
    monkeypatch.setattr(text_attention, "_SCORES_OF_THREADS", 1)
    attention = TextAttention(lanes, granule=8)
    torch.set_num_threads(threads)
    if not attention.suits(256, torch.float32):
        return  # the oldest kernels sum in another order: texts are read as before
    for scores in (1 << 30, 20_000):
        monkeypatch.setattr(text_attention, "_SCORES", scores)
        assert torch.equal(attention.attend(q, cache, 0, begins), expected)


def test_kernels_that_sum_otherwise_are_not_used(monkeypatch):
    attention = TextAttention(Lanes(4, 2, 8), granule=8)
    real = torch.Tensor.index_add_

    def otherwise(sums, dim, index, source):
        return real(sums, dim, index, source.flip(0))

    monkeypatch.setattr(torch.Tensor, "index_add_", otherwise)
    assert not attention.suits(4096, torch.float32)


def test_scores_are_of_what_a_token_sees(monkeypatch):
    """All positions of the row were multiplied for each piece of it, those behind it in vain."""
    lanes, length = Lanes(4, 2, 8), 2048
    cache, _, q = rows_of(lanes, [0], length)
    made, real = [], torch.baddbmm

    def counting(*args, **kwargs):
        scores = real(*args, **kwargs)
        made.append(scores.numel())
        return scores

    monkeypatch.setattr(torch, "baddbmm", counting)
    TextAttention(lanes, granule=8).attend(q, cache, 0, [0])
    needed = 4 * length * length / 2
    assert needed < sum(made) < 1.1 * needed


def test_blocks_are_of_bounded_scores_and_of_a_granule_or_more():
    attention = TextAttention(Lanes(9, 3, 64), granule=64)
    for length, first in ((64, 0), (200, 0), (4096, 0), (4096, 100_000)):
        blocks = attention._blocks(length, first, 3)
        assert [b for b, _ in blocks[1:]] == [e for _, e in blocks[:-1]]
        assert (blocks[0][0], blocks[-1][1]) == (0, length)
        assert all(64 <= end - begin < 256 for begin, end in blocks)
