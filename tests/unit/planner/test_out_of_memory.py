"""A GPU that is full: the call, both numbers, what was planned, and what to lower."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import torch
from test_memory import cluster, plan_of

from realsys.api.errors import OutOfMemory
from realsys.model_worker.model_worker import ModelWorkerLoop
from realsys.model_worker.out_of_memory import explain_out_of_memory
from realsys.planner.memory.memory_messages import GiB, out_of_memory
from realsys.planner.memory.memory_of_workers import WorkerMemory

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
PLANNED = WorkerMemory(
    copies={"actor@0": {"weights": 15.0 * GiB, "optimizer": 30.0 * GiB}},
    calls={
        "actor_train": {"activations": 40.0 * GiB, "logits": 20.0 * GiB},
        "actor_gen": {"cache": 60.0 * GiB},
    },
)


@pytest.fixture(autouse=True)
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 70 * GiB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 74 * GiB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 * GiB, 79 * GiB))


def told(doing: str, planned: WorkerMemory | None = PLANNED) -> OutOfMemory:
    numbers = {"peak": 70 * GiB, "reserved": 74 * GiB, "others": 4 * GiB, "total": 79 * GiB}
    return out_of_memory(doing, where="model_worker/0", planned=planned, **numbers)


def test_what_to_lower_stands_in_the_order_of_its_effect():
    error = told("actor_train")
    golden.check(error)


def test_the_terms_are_those_of_the_call_that_failed():
    golden.check(told("actor_gen"))
    assert "activations" not in told("actor_gen").what


def test_without_a_plan_of_it_the_numbers_are_told_all_the_same():
    golden.check(told("actor_train", None))
    assert "max_tokens_per_mb" in told("actor_train", None).fix


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError(FULL), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("NCCL error: unhandled cuda error … Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError(), False),
    ],
)
def test_only_a_full_gpu_is_told_so(error, is_so):
    config = plan_of(cluster()).phases[0].config
    found = explain_out_of_memory(error, doing="train", worker=0, config=config)
    assert isinstance(found, OutOfMemory) is is_so
    assert is_so or found is error


def test_a_call_that_fills_the_gpu_ends_its_worker_and_its_request_in_our_words():
    """An engine that raises it; sizes and settings are those of the worker's own plan."""
    phase = plan_of(cluster()).phases[0]
    (call,) = phase.config.model_rpcs
    reply: Future[Any] = Future()

    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError(FULL)

    request = SimpleNamespace(call=call.name, step=3)
    ordered = SimpleNamespace(request=request, reply=reply)
    loop: Any = SimpleNamespace(
        ordered=SimpleNamespace(closed=False, take=lambda _: ordered),
        runner=SimpleNamespace(
            index=0,
            phase=phase,
            between_requests=lambda until: nullcontext(),
            set_log_step=lambda _: None,
            move=lambda *_, **__: None,
        ),
        _stall_limit_s=lambda _: 0.0,
        _handlers={SimpleNamespace: full},
    )
    with golden.raises(OutOfMemory) as caught:
        ModelWorkerLoop.run(loop)
    assert f"activations in {call.name}" in caught.value.what
    assert "max_tokens_per_mb" in caught.value.fix
    assert caught.value.where == "model_worker/0"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert reply.exception() is caught.value
