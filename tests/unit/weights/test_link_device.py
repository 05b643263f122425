"""Weights that lie elsewhere than a link's messages (shards of cpu_offload) go through a buffer there.

A message on the CPU would be sent by gloo while its receiver waits for one by NCCL. ``meta`` stands for
CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import torch

from realsys.api.errors import InternalError
from realsys.api.model import ProcessTopology
from realsys.models.shape import Weight
from realsys.weights.layouts.boxes import Box
from realsys.weights.layouts.holdings import whole_layout
from realsys.weights.realloc import torch_link
from realsys.weights.realloc.links import Send
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc
from realsys.weights.realloc.torch_link import TorchLink

WEIGHTS = [Weight("large", (600, 600)), Weight("small", (5,))]
LAYOUT = whole_layout(WEIGHTS, ProcessTopology())
PLAN = plan_realloc(WEIGHTS, LAYOUT, [0], LAYOUT, [1])


class Arrived(TorchLink):
    """A link whose messages are there at once."""

    def arrivals(self, receives: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for peer, receive in receives.items():
            yield peer, torch.zeros(receive.num_bytes, dtype=torch.uint8)


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is given to torch.distributed."""
    tensors: list[torch.Tensor] = []

    def batch(ops: Any) -> Any:
        tensors.extend(op.tensor for op in ops)
        return [SimpleNamespace(wait=lambda _: True) for _ in ops]

    def op(kind: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        return SimpleNamespace(tensor=tensor)

    monkeypatch.setattr(torch_link.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_link.dist, "P2POp", op)
    monkeypatch.setattr(torch_link.dist, "batch_isend_irecv", batch)
    return tensors


def move(worker: int, device: str) -> dict[str, torch.Tensor]:
    """The worker's end of the plan, with its weights on the CPU; gives them."""
    held = {w.name: torch.ones(w.shape) for w in WEIGHTS}
    views: Any = {name: [(Box.whole(tuple(x.shape)), x)] for name, x in held.items()}
    link = Arrived(timeout_s=240, device=device)
    source, target = (views, None) if worker == 0 else (None, views)
    Reallocator(worker, link).run(PLAN, source, target)
    return held


@pytest.mark.parametrize("worker", [0, 1], ids=["sender", "receiver"])
def test_every_message_is_on_the_links_device(posted, worker):
    held = move(worker, "meta")
    assert {x.device.type for x in posted} == {"meta"}
    assert sum(x.numel() for x in posted) == sum(x.numel() * 4 for x in held.values())
    if worker == 1:
        assert not any(x.any() for x in held.values()), "what arrived was taken in"


@pytest.mark.parametrize("worker", [0, 1], ids=["sender", "receiver"])
def test_a_large_weight_on_that_device_is_its_own_message(posted, worker):
    held = move(worker, "cpu")
    assert held["large"].data_ptr() in [x.data_ptr() for x in posted]


def test_a_message_elsewhere_is_an_error_and_not_a_wait(posted):
    link = TorchLink(timeout_s=240, device="meta")
    with golden.raises(InternalError):
        link.post({1: Send(torch.zeros(4, dtype=torch.uint8), 0)}, {})
