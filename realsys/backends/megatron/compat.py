"""Makes Megatron-Core work on the CPU: CPU tensors, gloo groups.

Megatron-Core uses ``torch.cuda``'s device and makes tensors with ``device="cuda"``. In a process that
computes on the CPU, its modules get a proxy under the name ``torch`` that replaces both by "cpu". Only
Megatron's modules see it; torch itself and its other users in this process are not changed. A process
computes on one device, the model's, whatever the machine has.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")
_PREFIX = "megatron.core"
_SEED = 1


def prepare_process(device: str) -> None:
    """Makes Megatron-Core usable in this process, once; on a GPU hardly anything is needed."""
    if device.startswith("cuda"):
        _add_random_state()
        return
    stand_in = _torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX) and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    from megatron.core.tensor_parallel import random

    # Recomputation saves the GPU generator's state, which does not exist here.
    random._get_cuda_rng_state = _nothing
    random._set_cuda_rng_state = _nothing


def prepare_parameters(module: nn.Module) -> None:
    """Prepares ``module``'s parameters; must be called before Megatron makes their optimizer.

    Its optimizers distinguish precisions by the type name, ``torch.cuda.FloatTensor``. On the CPU each
    parameter reports the GPU type name; nothing else of it changes.
    """
    for parameter in module.parameters():
        if parameter.is_cuda:
            continue
        name = parameter.data.type().replace("torch.", "torch.cuda.")
        parameter.type = functools.partial(str, name)  # type: ignore[method-assign, assignment]


def _add_random_state() -> None:
    """Adds the GPU generator state that Megatron enters if activations are split over the tensor axis.

    For ``sequence_parallel``. Nothing draws from it: there is no dropout.
    """
    from megatron.core.tensor_parallel import random

    tracker, name = random.get_cuda_rng_tracker(), random._MODEL_PARALLEL_RNG_TRACKER_NAME
    if name not in tracker.get_states():
        tracker.add(name, _SEED)


class _TorchProxy(types.ModuleType):
    """Proxy of a module that overrides some attributes of ``original``."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


@functools.cache
def _torch_proxy() -> _TorchProxy:
    cuda = _TorchProxy(
        torch.cuda,
        current_device=functools.partial(torch.device, "cpu"),
        synchronize=_nothing,
        empty_cache=_nothing,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _TorchProxy(torch, cuda=cuda, **factories)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **settings: Any) -> Any:
        if settings.get("device") == "cuda":
            settings["device"] = "cpu"
        return factory(*args, **settings)

    return make


def _nothing(*args: Any, **settings: Any) -> None:
    """Replaces functions that only a GPU needs."""
