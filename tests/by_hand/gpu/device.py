"""The device that the kit probes: CUDA's, or this CPU in its place, to see that the kit reaches its end.

Stood in for are the calls that only a GPU answers. What they would tell is 0, which no probe takes for a
measurement: results of a stand-in say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

GiB = 1 << 30


@dataclass
class Device:
    """``kind`` is ``cuda`` or ``cpu``; ``small`` asks for sizes that a test can afford."""

    kind: str

    @property
    def small(self) -> bool:
        return self.kind != "cuda"

    def sync(self) -> None:
        """Waits for all that was started."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def free_cache(self) -> None:
        """Between probes, so that each begins with the same memory."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def used(self) -> int:
        """Bytes of tensors on the device."""
        return torch.cuda.memory_allocated() if self.kind == "cuda" else 0

    @contextmanager
    def peak(self) -> Iterator[Callable[[], int]]:
        """Gives a function: most bytes of tensors so far beyond those at the beginning."""
        if self.kind != "cuda":
            yield lambda: 0
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - before

    def seconds(self, f: Callable[[], object], *, times: int = 1) -> float:
        """Of one call, mean over ``times``; whatever it needs the first time included."""
        self.sync()
        begin = time.perf_counter()
        for _ in range(times):
            f()
        self.sync()
        return (time.perf_counter() - begin) / times

    def milliseconds(self, f: Callable[[], object], *, times: int = 5) -> float:
        """Of one call, after one that does not count."""
        f()
        return round(self.seconds(f, times=times) * 1e3, 3)
