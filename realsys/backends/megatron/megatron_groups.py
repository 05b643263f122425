"""Megatron's process groups of one model copy.

Megatron-Core keeps its process groups in globals of ``parallel_state``: one topology per process. Here
several models with different topologies share a process, so ``MegatronGroups.active`` sets the globals to
a model's groups for the duration of an operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import GlobalMemoryBuffer

from realsys.api.errors import InternalError
from realsys.api.model import Model, ProcessTopology
from realsys.backends.hf.singleton_group import singleton_group

_KNOWN_WARNINGS = (  # Megatron's and torch's warnings about Megatron itself; users can't act on them
    (".*tp_group is None", DeprecationWarning),
    (".*torch.distributed.* is deprecated", FutureWarning),
    ("When using async grad allreduce", UserWarning),  # only relevant for older GPUs
)
# Made once per process: Megatron's scratch memory.
_process: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class MegatronGroups:
    """The groups of one model as in ``ParallelGroups``, but with a real group for every axis.

    Attributes:
        alone: the group of this process alone.
        ends: first and last pipeline stage; None in the middle of a pipeline.
    """

    topology: ProcessTopology
    rank: int
    copy: Any
    data: Any
    tensor: Any
    pipeline: Any
    slot: Any
    ends: Any
    alone: Any

    @staticmethod
    def of(model: Model) -> MegatronGroups:
        """Returns the groups of ``model``; without torch.distributed, makes a world of size one."""
        topo, alone = model.topology, singleton_group(model.device)
        sizes = {
            "copy": topo.world_size,
            "data": topo.data,
            "tensor": topo.tensor,
            "pipeline": topo.pipeline,
            "slot": topo.tensor * topo.pipeline,
        }
        found = {axis: getattr(model.groups, axis) or alone for axis in sizes}
        for axis, size in sizes.items():
            if (has := dist.get_world_size(found[axis])) != size:
                raise InternalError(
                    f"the {axis} group has {has} processes, {topo} needs {size}",
                    where=str(model.name),
                )
        ends = model.groups.ends if topo.pipeline > 1 else alone
        return MegatronGroups(topology=topo, rank=model.rank, **found, ends=ends, alone=alone)

    @property
    def coordinate(self) -> tuple[int, int, int]:
        """(pipeline, data, tensor) of this process."""
        return self.topology.coordinate(self.rank)

    @property
    def is_last_stage(self) -> bool:
        """True if this process computes the model's output."""
        return self.coordinate[0] == self.topology.pipeline - 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context, Megatron uses these groups. May be nested; not thread-safe."""
        state = self._state()
        before = {name: getattr(parallel_state, name) for name in state}
        _set(state)
        try:
            with warnings.catch_warnings():
                for message, category in _KNOWN_WARNINGS:
                    warnings.filterwarnings("ignore", message, category)
                yield
        finally:
            _set(before)

    def _state(self) -> dict[str, Any]:
        """Values of the globals of ``parallel_state``. Context and expert axes have a single process."""
        ranks = dist.get_process_group_ranks
        pipeline = ranks(self.pipeline)
        ends = sorted({0, len(pipeline) - 1})
        return {
            "_TENSOR_MODEL_PARALLEL_GROUP": self.tensor,
            "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": ranks(self.tensor),
            "_PIPELINE_MODEL_PARALLEL_GROUP": self.pipeline,
            "_PIPELINE_GLOBAL_RANKS": pipeline,
            "_MODEL_PARALLEL_GROUP": self.slot,
            "_MODEL_PARALLEL_GLOBAL_RANKS": ranks(self.slot),
            "_EMBEDDING_GROUP": self.ends,
            "_EMBEDDING_GLOBAL_RANKS": [pipeline[i] for i in ends],
            "_POSITION_EMBEDDING_GROUP": self.alone,
            "_POSITION_EMBEDDING_GLOBAL_RANKS": pipeline[:1],
            "_DATA_PARALLEL_GROUP": self.data,
            "_DATA_PARALLEL_GLOBAL_RANKS": ranks(self.data),
            "_DATA_PARALLEL_GROUP_WITH_CP": self.data,
            "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": ranks(self.data),
            "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": self.data,
            "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": self.copy,
            "_CONTEXT_PARALLEL_GROUP": self.alone,
            "_CONTEXT_PARALLEL_GLOBAL_RANKS": ranks(self.alone),
            "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": self.tensor,
            "_EXPERT_MODEL_PARALLEL_GROUP": self.alone,
            "_EXPERT_TENSOR_PARALLEL_GROUP": self.tensor,
            "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": self.tensor,
            "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": self.slot,
            "_EXPERT_DATA_PARALLEL_GROUP": self.data,
            "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": self.data,
            "_GLOBAL_MEMORY_BUFFER": _process.setdefault("memory", GlobalMemoryBuffer()),
        }


def _set(state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(parallel_state, name, value)
