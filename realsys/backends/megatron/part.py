"""Builds one process's part of a model: its stage, marked and filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from realsys.api.errors import ConfigError
from realsys.api.model import Model, ModuleSource
from realsys.backends.megatron import compat
from realsys.backends.megatron.megatron_groups import MegatronGroups
from realsys.backends.megatron.megatron_weights import (
    Slice,
    load,
    mark_cut_parameters,
    stage_slices,
    views_of,
)
from realsys.backends.megatron.modules import (
    has_transformer_engine,
    make_stage,
    transformer_config,
)
from realsys.models.shape import ModelShape
from realsys.models.source import source_of
from realsys.weights.layouts.holdings import layout_problems


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process's part of a model: its stage with weights, and its source, shape and groups."""

    source: ModuleSource
    shape: ModelShape
    groups: MegatronGroups
    stage: nn.Module
    holdings: Sequence[Sequence[Slice]]  # by rank of the copy

    @staticmethod
    def of(model: Model, *, recompute: bool = False, sequence_parallel: bool = False) -> Part:
        """Builds the stage, and fills it from the model's source unless another copy will.

        Raises:
            ConfigError: the model can't be split that way, or needs features that Megatron's layers lack.
        """
        source = source_of(model)
        shape, topo = source.shape(), model.topology
        if problems := layout_problems(shape, topo, "megatron"):
            raise problems[0]
        compat.prepare_process(model.device)
        groups = MegatronGroups.of(model)
        dtype = _dtype_of(source, model)
        config = transformer_config(
            shape,
            source.config(),
            topo,
            dtype=dtype,
            device=model.device,
            recompute=recompute,
            sequence_parallel=sequence_parallel and topo.tensor > 1,
        )
        fused = has_transformer_engine(model.device)
        holdings = [stage_slices(shape, topo, r, fused_norms=fused) for r in range(topo.world_size)]
        with groups.active():
            stage = make_stage(shape, source.config(), topo, config, stage=groups.coordinate[0])
        mark_cut_parameters(stage, holdings[model.rank])
        if model.filled:
            load(views_of(stage, holdings[model.rank]), source)
        return Part(source=source, shape=shape, groups=groups, stage=stage, holdings=holdings)


def _dtype_of(source: ModuleSource, model: Model) -> torch.dtype:
    if source.dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"weights of {source.dtype}, which the megatron backend does not support",
            where=f"dtype of {model.name}",
            fix="use float32 or bfloat16",
        )
    dtype: torch.dtype = getattr(torch, source.dtype)
    return dtype
