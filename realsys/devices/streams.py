"""Work that a GPU was given and has not done: waited for, or read beside. On the CPU nothing is pending."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_beside: dict[str, Any] = {}  # the stream on which this process reads, once it has one


def finish(device: str) -> None:
    """Returns when the device has done what this process gave it: a clock read now tells the truth."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def written(tensors: Iterable[Tensor]) -> Any:
    """The moment, in the order of this thread's work, at which ``tensors`` are whole; None: they are."""
    if not any(x.is_cuda for x in tensors):
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def read_beside(moments: Iterable[Any]) -> Iterator[None]:
    """Inside, a GPU waits for these moments (of ``written``), and for nothing behind them.

    Copies made inside must be to the CPU and blocking: nothing else keeps their sources till then.
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
