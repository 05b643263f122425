"""Heads that share keys: repeated where no fused kernel takes them so, and the numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from near import assert_near

from realsys.backends.kernels import packed_attention
from realsys.backends.kernels.grouped_heads import keys_for
from realsys.backends.megatron import modules


class OnGPU(torch.Tensor):
    """A CPU's numbers that say they are a GPU's."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def heads(count: int, dtype: torch.dtype, kind: type[torch.Tensor] = OnGPU) -> Any:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(2, count, 5, 8, generator=generator).to(dtype).as_subclass(kind)


@pytest.mark.parametrize(
    ("dtype", "kind", "groups", "shared", "keys"),
    [
        (torch.float32, OnGPU, 2, False, 6),  # only the memory-efficient kernel takes float32
        (torch.bfloat16, OnGPU, 2, True, 2),
        (torch.float32, torch.Tensor, 2, True, 2),
        (torch.float32, OnGPU, 6, False, 6),
    ],
)
def test_keys_are_repeated_in_float32_on_a_gpu_only(dtype, kind, groups, shared, keys):
    key, value, enable_gqa = keys_for(*(heads(n, dtype, kind) for n in (6, groups, groups)))
    assert (enable_gqa, key.shape[1], value.shape[1]) == (shared, keys, keys)


def test_repeated_keys_give_the_same_answer():
    q, k, v = heads(6, torch.float32), heads(2, torch.float32), heads(2, torch.float32)
    k_all, v_all, _ = keys_for(q, k, v)
    found = F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_near(found, expected)


@pytest.mark.parametrize("module", [packed_attention, modules])
def test_attention_asks_for_shared_heads_as_decided(monkeypatch, module):
    asked: list[tuple[int, bool]] = []

    def spy(q: Any, k: Any, v: Any, *, enable_gqa: bool, **_: Any) -> Any:
        asked.append((k.shape[1], enable_gqa))
        return torch.zeros(q.shape)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q, k = heads(6, torch.float32), heads(2, torch.float32)
    if module is modules:
        attention = modules.CausalAttention(config=None)  # type: ignore[arg-type]
        attention(*(x.permute(2, 0, 1, 3) for x in (q, k, k)))
    else:
        from realsys.backends.kernels.packed_pieces import Pieces

        pieces = Pieces.of(torch.arange(5), [[5]])
        packed_attention.attend(None, q[:1], k[:1], k[:1], None, pieces=pieces)  # type: ignore[arg-type]
    assert asked == [(6, False)]
