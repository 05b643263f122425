"""Imported before torch: ``cuda:0`` is then the host, computed by the CPU's kernels.

An operation that mixes devices raises as on a GPU. Streams and events do nothing, collectives are gloo's on
the same memory. Needs the library of host_as_cuda.cpp beside this file's name in ``$HOST_AS_CUDA``
(trials.py builds it), and a torch built for CPUs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    raise ImportError("import host_as_cuda before torch")
_TORCH = Path(importlib.util.find_spec("torch").origin).parent
ctypes.CDLL(str(_TORCH / "lib/libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(os.environ["HOST_AS_CUDA"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

MEMORY = (75 << 30, 80 << 30)  # free, in all


class HostStream:
    """Everything on it is done at once."""

    cuda_stream = stream_id = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or HostEvent()


class HostEvent:
    """It has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Runtime:
    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        return 0


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def stand_in_for_cuda() -> None:
    """Replaces what torch asks CUDA itself."""
    cuda, stream = torch.cuda, HostStream()
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "mem_get_info": MEMORY,
        "get_device_capability": (9, 0),
        "get_device_name": "the host as cuda",
        "current_stream": stream,
        "default_stream": stream,
        "cudart": _Runtime(),
        **dict.fromkeys(("memory_reserved", "memory_allocated"), 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
        **dict.fromkeys(("_lazy_init", "init", "set_device", "synchronize", "empty_cache")),
        **dict.fromkeys(("reset_peak_memory_stats", "set_per_process_memory_fraction")),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_sync_debug_mode")),
    }.items():
        setattr(cuda, name, _always(value))
    cuda.Stream, cuda.Event = HostStream, HostEvent
    cuda.default_generators = (torch.default_generator,)
    cuda.stream = cuda.device = _nothing
    for name in ("getDevice", "exchangeDevice", "maybeExchangeDevice", "setDevice"):
        setattr(torch._C, f"_cuda_{name}", _always(0))
    torch._C._cuda_getDeviceCount = _always(1)
    torch._C._cuda_getCurrentRawStream = _always(0)  # torch's compiler imports it, who says "cuda"


def stand_in_for_memory() -> None:
    """Replaces what tensors and storages do with a GPU's memory."""
    torch.Tensor.record_stream = _always(None)
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = _always(False)
    resize_on_host = torch.UntypedStorage.resize_

    def resize(self: Any, bytes_: int) -> Any:
        if self.device.type != "cuda":
            return resize_on_host(self, bytes_)
        holder = torch.empty(0, dtype=torch.uint8, device="cuda").set_(self)
        torch.ops.host_as_cuda.resize_storage(holder, bytes_)
        return self

    torch.UntypedStorage.resize_ = resize


def stand_in_for_attention() -> None:
    """The CPU's fused attention takes no tensors of a GPU: the kernel of plain products does."""
    functional = torch.nn.functional
    on_host = functional.scaled_dot_product_attention

    def attention(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if not q.is_cuda:
            return on_host(q, k, v, attn_mask, dropout_p, is_causal, **options)
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, None, **options)[0]

    functional.scaled_dot_product_attention = attention


# ---- collectives -----------------------------------------------------------------------------------------


class _Done:
    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _of_host(x: torch.Tensor) -> torch.Tensor:
    """The same memory as the CPU's."""
    return torch.ops.host_as_cuda.seen_by_cpu(x.detach()) if x.is_cuda else x


def stand_in_for_nccl() -> None:
    """Makes every process group gloo's, and its collectives ones on the same memory."""
    on_host = {
        name: getattr(dist, name)
        for name in ("all_reduce", "broadcast", "all_gather", "init_process_group")
    }
    send_on_host, gather_into_on_host = dist.batch_isend_irecv, dist.all_gather_into_tensor

    def done(async_op: bool) -> _Done | None:
        return _Done() if async_op else None

    def all_reduce(
        x: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not x.is_cuda:
            return on_host["all_reduce"](x, op=op, group=group, async_op=async_op)
        if dist.get_world_size(group) > 1:
            summed = _of_host(x).contiguous()
            on_host["all_reduce"](summed, op=op, group=group)
            _of_host(x).copy_(summed)
        return done(async_op)

    def all_gather(found: Sequence[Any], x: Any, group: Any = None, async_op: bool = False) -> Any:
        if not x.is_cuda:
            return on_host["all_gather"](found, x, group=group, async_op=async_op)
        parts = [torch.empty_like(_of_host(x)) for _ in found]
        if len(parts) == 1:
            parts[0].copy_(_of_host(x))
        else:
            on_host["all_gather"](parts, _of_host(x).contiguous(), group=group)
        for target, part in zip(found, parts, strict=True):
            _of_host(target).copy_(part)
        return done(async_op)

    def all_gather_into_tensor(
        output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        if not output_tensor.is_cuda:
            return gather_into_on_host(output_tensor, input_tensor, group=group, async_op=async_op)
        parts = [torch.empty_like(input_tensor) for _ in range(dist.get_world_size(group))]
        all_gather(parts, input_tensor, group)
        whole = torch.cat([_of_host(part).reshape(-1) for part in parts])
        _of_host(output_tensor).view(-1).copy_(whole)
        return done(async_op)

    def reduce_scatter_tensor(
        output: Any,
        input: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        ranks, summed = dist.get_world_size(group), _of_host(input).clone()
        if ranks > 1:
            on_host["all_reduce"](summed, op=dist.ReduceOp.SUM, group=group)
        if "AVG" in str(op).upper():
            summed.div_(ranks)
        mine = summed.view(ranks, -1)[dist.get_rank(group)]
        _of_host(output).view(-1).copy_(mine)
        return done(async_op)

    def broadcast(
        x: Any,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        if not x.is_cuda:
            return on_host["broadcast"](x, src, group, async_op, group_src)
        if dist.get_world_size(group) > 1:
            on_host["broadcast"](_of_host(x), src, group, False, group_src)
        return done(async_op)

    def batch_isend_irecv(operations: Sequence[Any]) -> Any:
        for operation in operations:
            operation.kept = operation.tensor  # or its memory goes before it is sent
            operation.tensor = _of_host(operation.tensor)
        return send_on_host(operations)

    def init_process_group(_: str | None = None, **options: Any) -> None:
        options.pop("backend", None)
        on_host["init_process_group"]("gloo", **options)

    for f in (all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor):
        setattr(dist, f.__name__, f)
    for f in (broadcast, batch_isend_irecv, init_process_group):
        setattr(dist, f.__name__, f)


def stand_in() -> None:
    """For all that a worker asks a GPU."""
    stand_in_for_cuda()
    stand_in_for_memory()
    stand_in_for_attention()
    stand_in_for_nccl()
