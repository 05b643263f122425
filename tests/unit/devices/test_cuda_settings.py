"""Torch's switches by device: what they are, that each role sets them; and the environment of a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.ppo_math import ppo_math_async
from realsys.api.scheduling import Scheduling
from realsys.devices.cuda_settings import apply, settings_for
from realsys.worker.environment import gpu_variables


@pytest.fixture
def switches() -> Iterator[None]:
    """Puts torch's own back."""
    before = (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
    torch.backends.cuda.enable_cudnn_sdp(before[2])


@pytest.mark.parametrize(
    ("device", "deterministic", "mode"),
    [
        ("cpu", None, "warn"),
        ("cpu", True, "warn"),
        ("cpu", False, "default"),
        ("cuda", None, "default"),
        ("cuda", False, "default"),
        ("cuda", True, "error"),  # with "warn" flash attention's backward stays unordered
    ],
)
def test_determinism_is_promised_or_left_out(device, deterministic, mode):
    assert settings_for(device, deterministic=deterministic).debug_mode == mode


def test_switches_are_set(switches, monkeypatch):
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    torch.backends.cuda.enable_cudnn_sdp(True)
    apply(settings_for("cpu"))
    assert torch.get_deterministic_debug_mode() == 1
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.backends.cuda.cudnn_sdp_enabled()
    apply(settings_for("cuda", gpus=1))
    assert torch.get_deterministic_debug_mode() == 0
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert shares == []
    apply(settings_for("cuda:0", deterministic=True, gpus=0.5))
    assert torch.get_deterministic_debug_mode() == 2
    assert shares == [pytest.approx(0.475)]  # two of them, and what CUDA itself has in each


@pytest.mark.parametrize("role", ["model_worker", "evaluator"])
def test_roles_set_them_by_their_task(switches, monkeypatch, role):
    from realsys.evaluator import build as evaluator
    from realsys.model_worker import build as model_worker

    asked: list[Any] = []
    build: Any = {"model_worker": model_worker, "evaluator": evaluator}[role]
    monkeypatch.setattr(build, "apply", asked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    group = SimpleNamespace(scheduling=Scheduling(gpu=1))
    runner: Any = SimpleNamespace(
        name=f"{role}/0",
        config=SimpleNamespace(num_threads=None, base_seed=1),
        phase=SimpleNamespace(
            scheduling=SimpleNamespace(model_worker=group, evaluator=group),
            config=SimpleNamespace(deterministic=True),
        ),
    )
    assert build._set_up_torch(runner) == "cuda"
    assert asked == [settings_for("cuda", deterministic=True, gpus=1)]


def phase(
    *, gpu: float = 1, backend: str = "embedded", deterministic: bool | None = None
) -> SimpleNamespace:
    experiment = ppo_math_async()
    scheduling = experiment.scheduling_setup()
    with_gpu = {
        kind: replace(getattr(scheduling, kind), scheduling=Scheduling(gpu=gpu))
        for kind in ("model_worker", "generation_server")
    }
    server = SimpleNamespace(backend_type=backend)
    config = SimpleNamespace(generation_server=(server,), deterministic=deterministic)
    return SimpleNamespace(scheduling=replace(scheduling, **with_gpu), config=config)


ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("kind", "options", "environ", "found"),
    [
        ("model_worker", {}, {}, ALLOCATOR),
        ("generation_server", {}, {}, ALLOCATOR),
        ("generation_server", {"backend": "sglang"}, {}, {}),  # a program with its own habits
        ("model_worker", {"gpu": 0}, {}, {}),
        ("master_worker", {}, {}, {}),
        ("model_worker", {}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ("model_worker", {}, {"PYTORCH_CUDA_ALLOC_CONF": ""}, {}),
        (
            "model_worker",
            {"deterministic": True},
            {},
            {**ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        ),
        ("model_worker", {"deterministic": True}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ALLOCATOR),
        ("model_worker", {"deterministic": False}, {}, ALLOCATOR),
        ("model_worker", {"deterministic": True, "gpu": 0}, {}, {}),
    ],
)
def test_what_must_be_set_before_cuda_starts(kind, options, environ, found):
    given: Any = phase(**options)
    assert gpu_variables(given, kind, environ) == found


def test_the_setting_reaches_the_plan():
    for value in (None, True, False):
        experiment = replace(ppo_math_async(), deterministic=value)
        assert experiment.initial_setup().deterministic is value


def test_a_server_with_a_gpu_computes_there_in_bfloat16(switches, monkeypatch, tmp_path):
    """Its model is loaded onto it; what the plan says of the type wins."""
    from realsys.api.worker_configs import GenerationServer
    from realsys.generation.server import build
    from realsys.models import hf

    loaded: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hf, "load_tokenizer", lambda path: SimpleNamespace(pad_token_id=0))
    monkeypatch.setattr(hf, "end_token_ids", lambda *_: ())
    monkeypatch.setattr(build, "EmbeddedEngine", lambda *_, **__: None)

    def load(path: str, *, dtype: str, device: str) -> Any:
        loaded.append((dtype, device))
        return SimpleNamespace()

    monkeypatch.setattr(hf, "load_causal_lm", load)
    for args, gpus in (({}, 1.0), ({"dtype": "float32"}, 1.0), ({}, 0.0)):
        config = GenerationServer(backend_type="embedded", backend_args=args, model_path="/m")
        given: dict[str, Any] = {
            "name": "generation_server/0",
            "log": tmp_path,
            "scratch": tmp_path,
        }
        build.make_engine(config, fetch=lambda *_: None, gpus=gpus, **given)
    assert loaded == [("bfloat16", "cuda"), ("float32", "cuda"), ("float32", "cpu")]
