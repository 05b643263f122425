"""What is built for a model is built for the model's device, whatever else the machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from realsys.backends.hf import singleton_group as groups
from realsys.backends.megatron import compat, modules


@pytest.fixture
def megatron_random() -> Any:
    """Imported behind our backend, which keeps its warnings quiet."""
    from megatron.core.tensor_parallel import random

    return random


@pytest.fixture
def gpu_in_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("cuda:0", "cpu:gloo,cuda:nccl")],
)
def test_a_world_of_one_is_of_the_models_device(monkeypatch, gpu_in_the_machine, device, backend):
    asked: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: asked.append(name))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: object())
    monkeypatch.setattr(groups, "_singleton", {"world": "another one"})
    groups.singleton_group(device)
    assert asked == [backend]


def test_layers_are_made_for_the_models_device(monkeypatch, gpu_in_the_machine):
    monkeypatch.setattr(modules.specs, "HAVE_TE", True)
    assert not modules.has_transformer_engine("cpu")
    assert modules.has_transformer_engine("cuda")


def test_on_the_cpu_megatron_is_given_the_cpu(monkeypatch, gpu_in_the_machine, megatron_random):
    """Its name for torch is another one then, though there is a GPU."""
    from megatron.core.transformer import transformer_block

    monkeypatch.setattr(transformer_block, "torch", torch)
    monkeypatch.setattr(megatron_random, "torch", torch)
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        monkeypatch.setattr(megatron_random, name, getattr(megatron_random, name))
    compat.prepare_process("cpu")
    seen: Any = transformer_block
    assert seen.torch.cuda.current_device() == torch.device("cpu")
    assert seen.torch.zeros(1, device="cuda").device.type == "cpu"
    layer = torch.nn.Linear(2, 2)
    compat.prepare_parameters(layer)
    assert layer.weight.type() == "torch.cuda.FloatTensor"


def test_megatrons_generator_has_its_state_once(monkeypatch, megatron_random):
    """It is entered wherever activations are cut over the tensor axis."""
    state = torch.zeros(16, dtype=torch.uint8)
    seeds: list[int] = []
    monkeypatch.setattr(megatron_random, "torch", torch)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_, **__: state)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", lambda **_: state)
    monkeypatch.setattr(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None)
    megatron_random.initialize_rng_tracker(force_reset=True)
    try:
        for _ in range(2):  # two models in a process
            compat.prepare_process("cuda")
        tracker = megatron_random.get_cuda_rng_tracker()
        with tracker.fork():
            pass
        assert len(seeds) == 1
    finally:
        megatron_random.initialize_rng_tracker(force_reset=True)
