"""Sources of a module's weights: a Hugging Face directory, or a module in memory.

A backend requests what it needs: the whole module, an uninitialised one to be filled from another copy,
or the parts that this process holds, which are read without the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from realsys.api.errors import ConfigError
from realsys.api.model import Model, ModuleSource
from realsys.models.consistency import check_consistency
from realsys.models.hf import (
    empty_model,
    hf_skeleton,
    load_causal_lm,
    load_critic,
    load_hf_config,
    readable_skeleton,
)
from realsys.models.hf_directory import check_hf_directory
from realsys.models.shape import ModelShape, Weight, read_shape, shape_of
from realsys.models.weight_files import WeightFiles

_CRITIC_HEAD = {"score.weight": "classifier.weight", "score.bias": "classifier.bias"}
_HEADS = {*_CRITIC_HEAD, *_CRITIC_HEAD.values()}


def source_of(model: Model) -> ModuleSource:
    """Returns the source of a model that no backend has wrapped yet."""
    module = model.module
    return module if isinstance(module, ModuleSource) else ModuleInMemory(module)


def module_of(model: Model) -> nn.Module:
    """Returns the whole Hugging Face module: loaded, or uninitialised if another copy fills it."""
    if isinstance(model.module, ModuleSource):
        module: nn.Module = model.module.load() if model.filled else model.module.empty()
        return module
    return model.module  # type: ignore[no-any-return]


class HFSource(ModuleSource):
    """A Hugging Face directory, as a language model or (``critic``) with a value head.

    The head is read from the directory if it has one, else it is 0.
    """

    def __init__(self, path: str, *, critic: bool, dtype: str, device: str) -> None:
        self.path, self.critic, self.dtype, self.device = path, critic, dtype, device
        check_consistency(path, critic=critic)
        tensors = check_hf_directory(path, need_tokenizer=False).tensors
        self.has_head = any(n in tensors for n in ("score.weight", "classifier.weight"))
        self._files = WeightFiles(path)
        self._names: Mapping[str, str] = {}  # names in the files that differ from the module's

    def load(self) -> nn.Module:
        if not self.critic:
            return load_causal_lm(self.path, dtype=self.dtype, device=self.device)
        return load_critic(
            self.path,
            dtype=self.dtype,
            device=self.device,
            init_head="from_checkpoint" if self.has_head else "zero",
        )

    def empty(self) -> nn.Module:
        return empty_model(self.path, critic=self.critic, dtype=self.dtype, device=self.device)

    def skeleton(self, dtype: str | None = None) -> nn.Module | None:
        found = readable_skeleton(
            self.path,
            critic=self.critic,
            dtype=dtype or self.dtype,
            takes_head=self.critic and self.has_head,
        )
        if found is None:
            return None
        module, self._names = found
        return module

    def config(self) -> Any:
        return load_hf_config(self.path)

    def read(self, name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> Tensor:
        shape = [b - a for a, b in zip(start, stop, strict=True)]
        part = torch.empty(shape, dtype=getattr(torch, self.dtype))
        self.read_into(part, name, start, stop)
        return part

    @torch.no_grad()
    def read_into(
        self, view: Tensor, name: str, start: tuple[int, ...], stop: tuple[int, ...]
    ) -> None:
        stored = self._names.get(name, name)
        if stored not in self._files:
            stored = _CRITIC_HEAD.get(name, name)
        if stored in self._files:
            view.copy_(self._files.window(stored, start, stop))
        elif self.critic and name in _HEADS:
            view.zero_()
        else:
            raise KeyError(name)

    def shape(self) -> ModelShape:
        return read_shape(self.path, critic=self.critic)

    def weights(self) -> tuple[Weight, ...]:
        with suppress(ConfigError):
            return self.shape().weights()
        # Named as in the module: files name some otherwise, and each expert of a mixture.
        module = hf_skeleton(self.path, critic=self.critic, dtype=self.dtype)
        return tuple(Weight(n, tuple(p.shape)) for n, p in module.named_parameters())


class ModuleInMemory(ModuleSource):
    """A module that is already in memory."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.critic = any(hasattr(module, n) for n in ("score", "classifier"))
        self.dtype = str(next(module.parameters()).dtype).removeprefix("torch.")

    def load(self) -> nn.Module:
        return self.module

    def empty(self) -> nn.Module:
        return self.module

    def config(self) -> Any:
        return self.module.config

    def shape(self) -> ModelShape:
        config: Any = self.module.config
        return shape_of(config.to_dict(), critic=self.critic)

    def weights(self) -> tuple[Weight, ...]:
        return tuple(Weight(n, tuple(p.shape)) for n, p in self.module.named_parameters())

    def read(self, name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> Tensor:
        weights = self.module.state_dict()
        stored = name if name in weights else _CRITIC_HEAD.get(name, name)
        part: Tensor = weights[stored][_index(start, stop)]
        return part.detach().cpu().clone()


def _index(start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
