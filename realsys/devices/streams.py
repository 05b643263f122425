"""Synchronisation with pending GPU work: waits for it, or reads on a separate stream. On the CPU
nothing is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_beside: dict[str, Any] = {}  # this process's read stream, made at first use


def finish(device: str) -> None:
    """Waits for all GPU work of this process, so that a clock read afterwards includes it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def written(tensors: Iterable[Tensor]) -> Any:
    """Records an event after which ``tensors`` are written; None if they already are (on the CPU)."""
    if not any(x.is_cuda for x in tensors):
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def read_beside(moments: Iterable[Any]) -> Iterator[None]:
    """Within the context, GPU reads wait for these events (of ``written``) and for nothing later.

    Copies made inside must be to the CPU and blocking: nothing else keeps their sources alive.
    """
    events = list({id(m): m for m in moments if m is not None}.values())
    if not events:
        yield
        return
    if "stream" not in _beside:
        _beside["stream"] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream = _beside["stream"]
    for event in events:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield
