"""What a GPU has not done yet: clocks wait for it, peers' reads only for what they read. With stand-ins."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer import tensor_server
from realsys.data.transfer.tensor_server import TensorServer
from realsys.data.transfer.tensor_store import TensorStore
from realsys.data.transfer.transfer_messages import TensorRequest
from realsys.devices import streams
from realsys.model_worker import model_worker
from realsys.model_worker.model_worker import ModelWorkerLoop
from realsys.transport.curve_keys import TrialKeypairs


class OnGPU(torch.Tensor):
    """A CPU's numbers that say they are a GPU's."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda."""
    said: list[str] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            Event.made += 1
            self.name = f"event {Event.made}"

        def record(self) -> None:
            said.append(f"record {self.name}")

    class Stream:
        def wait_event(self, event: Event) -> None:
            said.append(f"wait for {event.name}")

    @contextmanager
    def stream(_: Stream) -> Any:
        said.append("beside")
        yield
        said.append("back")

    monkeypatch.setattr(streams, "_beside", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: said.append("synchronize"))
    return said


def sample(*ids: str, kind: type[torch.Tensor]) -> SequenceSample:
    data = torch.arange(float(len(ids))).as_subclass(kind)
    return SequenceSample.from_tensors(ids, {"x": [[1]] * len(ids)}, {"x": data})


def served(store: TensorStore, *ids: str, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    server = TensorServer(
        store, name="model_worker/0", trial="t", attempt=1, keypairs=TrialKeypairs.generate()
    )

    def packed(rows: Any) -> Any:
        said.append("copy")
        return torch.cat([x.as_subclass(torch.Tensor) for x in rows]).view(torch.uint8)

    monkeypatch.setattr(tensor_server, "packed_bytes", packed)
    server._reply_with_rows(TensorRequest(trial="t", attempt=1, token="", key="x", ids=ids))


def test_peers_wait_for_what_they_read_and_not_for_what_came_since(gpu, monkeypatch):
    store = TensorStore()
    store.put(sample("a", "b", kind=OnGPU))
    store.put(sample("c", kind=OnGPU))
    served(store, "a", "b", monkeypatch=monkeypatch, said=gpu)
    assert gpu == [
        "record event 1",
        "record event 2",
        "wait for event 1",  # once, though two rows came with it
        "beside",
        "copy",
        "back",
    ]
    store.clear(["a", "b", "c"])
    assert store.write_events(["a", "c"]) == []


def test_on_the_cpu_nothing_is_waited_for(gpu, monkeypatch):
    store = TensorStore()
    store.put(sample("a", kind=torch.Tensor))
    served(store, "a", monkeypatch=monkeypatch, said=gpu)
    streams.finish("cpu")
    assert gpu == ["copy"]


def test_a_calls_time_ends_when_the_gpu_is_done(gpu, monkeypatch):
    """An inference call comes back while its last micro-batch still runs."""
    clock = iter((10.0, 11.0))

    def now() -> float:
        gpu.append("clock")
        return next(clock)

    def compute(*_: Any) -> Any:
        gpu.append("launched")
        return {}, None

    monkeypatch.setattr(model_worker, "time", SimpleNamespace(perf_counter=now, time=lambda: 0.0))
    monkeypatch.setattr(model_worker, "_compute", compute)
    batch = sample("a", kind=torch.Tensor)
    call = SimpleNamespace(input_keys=("x",), input_key_remap={})
    model = SimpleNamespace(
        module=None,
        device="cuda",
        rank=0,
        topology=SimpleNamespace(data_parallel_heads=lambda: [0]),
    )
    loop: Any = SimpleNamespace(
        shards=SimpleNamespace(call=lambda _: (call, model, None)),
        tensors=SimpleNamespace(get=lambda _: batch),
        _fetch_from_peers=lambda _: None,
    )
    request: Any = SimpleNamespace(call="ref_inf", meta=batch.meta)
    assert ModelWorkerLoop._run_call(loop, request).compute_s == 1.0
    assert gpu == ["clock", "launched", "synchronize", "clock"]
