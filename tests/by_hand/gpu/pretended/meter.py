"""Counts what a GPU would do: launches, seconds by a roofline, bytes alive; of tensors that hold nothing.

Under torch's FakeTensorMode operations give shapes alone, so that models of any size pass through the
project's own engines. Seconds are of an H100, from bytes and products of each operation: estimates.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

HOST_S = 5e-6  # Python and dispatcher for one eager operation, on a server's core
BYTES_PER_S, LEAST_S, SORT_S = 2.6e12, 3e-6, 60e-6
PRODUCTS_PER_S = {"matmul": 6.0e14, "attention": 3.5e14, "attention backward": 2.5e14}
MATMULS = {"mm": 0, "linear": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # → left factor
GATHERS = {"index", "index_select", "gather", "embedding", "scatter_add"}
OPTIMIZER = {"_fused_adamw_", "_foreach_add_", "_foreach_mul_", "_foreach_norm"}
NO_LAUNCH = {
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select"),
    *("split", "chunk", "unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind"),
    *("split_with_sizes", "diagonal", "unflatten", "_reshape_alias", "unfold", "view_as", "narrow"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh"),
    *("is_same_size", "set_", "resize_", "_local_scalar_dense", "sym_size", "prim", "device"),
    *("record_stream", "is_pinned"),
}
_resize_storage = torch.UntypedStorage.resize_


def _bytes(*trees: Any) -> int:
    on_gpu = [x for x in tree_iter(trees) if isinstance(x, torch.Tensor) and x.is_cuda]
    return sum(x.numel() * x.element_size() for x in on_gpu)


def estimate(name: str, args: Any, kwargs: Any, out: Any) -> tuple[float, str]:
    """Seconds of one operation, and its kind."""
    moved = _bytes(args, kwargs, out)
    if name in MATMULS:
        products = 2.0 * out.numel() * args[MATMULS[name]].shape[-1]
        return max(products / PRODUCTS_PER_S["matmul"], moved / BYTES_PER_S, LEAST_S), "matmul"
    if "flash_attention" in name or "efficient_attention" in name:
        backward = "backward" in name
        q, k = args[1:3] if backward else args[:2]
        products = 2.0 * q.numel() * k.shape[2] * (2.5 if backward else 1)  # causal: the half
        rate = PRODUCTS_PER_S["attention backward" if backward else "attention"]
        return max(products / rate, moved / BYTES_PER_S, LEAST_S), "attention"
    if name == "index_put":  # indices are sorted, then summed
        moved = 3 * _bytes(args[2]) + _bytes(args[0])
        return max(moved / BYTES_PER_S, LEAST_S) + SORT_S, "gather, scatter"
    if name in GATHERS:
        return max(2 * _bytes(out) / BYTES_PER_S, LEAST_S), "gather, scatter"
    if name == "scatter_":  # a sector of 32 bytes is read and written for each number
        return max(64.0 * args[3].numel() / BYTES_PER_S, LEAST_S), "cache write"
    if name == "index_copy_":
        return max(3 * _bytes(args[3]) / BYTES_PER_S, LEAST_S), "cache write"
    if name == "sort":
        return max(12 * moved / BYTES_PER_S, LEAST_S), "sort"
    return max(moved / BYTES_PER_S, LEAST_S), "optimizer" if name in OPTIMIZER else "elementwise"


class Meter(TorchDispatchMode):
    """While entered, follows every operation on ``cuda``.

    Attributes:
        launches: by operation.
        seconds: of the GPU, by kind.
        live, peak: bytes of storages, as torch's allocator rounds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

        def resize(storage: Any, size: int) -> Any:
            found = _resize_storage(storage, size)
            if storage._cdata in self._sizes:
                self._note(storage._cdata, size)
            return found

        torch.UntypedStorage.resize_ = resize

    def begin(self) -> None:
        """Counts from here; what is alive stays alive."""
        self.launches.clear()
        self.seconds.clear()
        self.peak = self.live

    @property
    def gpu_ms(self) -> float:
        """Of all kernels, one after another."""
        return 1e3 * sum(self.seconds.values())

    @property
    def host_ms(self) -> float:
        """What launching them takes the host."""
        return 1e3 * HOST_S * sum(self.launches.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[-1], kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if name not in NO_LAUNCH and any(x.is_cuda for x in tensors):
            seconds, kind = estimate(name, args, kwargs, out)
            self.launches[name] += 1
            self.seconds[kind] += seconds
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and x.is_cuda:
                self._follow(x.untyped_storage())
        return out

    def _follow(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._note, key, None)
        self._note(key, storage.nbytes())

    def _note(self, key: int, size: int | None) -> None:
        """``None``: the storage is gone."""
        self.live -= self._sizes.pop(key, 0)
        if size is not None:
            self._sizes[key] = -(-size // 512) * 512
            self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
