"""Forward engine of a model that is split over several processes.

All processes of a data-parallel slot get the same data and call together; results are equal on all of
them. Whole weights in Hugging Face shapes exist only for generation and saving.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realsys.api.model import Model
from realsys.backends.hf.data_parallel import DataParallel
from realsys.backends.hf.loading import save_streamed
from realsys.backends.hf.local_engine import ForwardOnly, LocalEngine, MicroBatches, UseOutput
from realsys.backends.hf.weighted_means import WeightedMeans
from realsys.backends.megatron.megatron_groups import MegatronGroups
from realsys.backends.megatron.megatron_weights import views_of
from realsys.backends.megatron.part import Part
from realsys.backends.megatron.pipeline_schedule import run_microbatches
from realsys.backends.megatron.whole_model import gather_weights, plain_module, skeleton_of
from realsys.models.weight_writer import DTYPE_NAMES, WeightSpec
from realsys.weights.layouts.boxes import Box


class StageEngine(LocalEngine):
    """Base of the engines over one process's part of a model."""

    def __init__(self, model: Model, part: Part) -> None:
        self.module: nn.Module = part.stage
        self.part, self.groups, self.slot = part, part.groups, part.groups.slot
        self.device = torch.device(model.device)
        self.base_seed, self.rank = model.base_seed, model.rank
        self.ranks = DataParallel.of(model)
        self._config: Any = part.stage.config
        self._replica: nn.Module | None = None
        self._replica_is_old = True
        self.module.requires_grad_(False)

    def _run(
        self, pieces: MicroBatches, use_output: UseOutput, *, trained: nn.Module | None = None
    ) -> None:
        """Runs all micro-batches through all stages; the last stage passes them to ``use_output``.

        ``trained`` is the module as wrapped by its optimizer; if given, the backward pass runs too.
        """
        self.module.train(trained is not None)  # recomputation checks it; there is no dropout
        stage: Any = self.part.stage
        cut_sequences = bool(self._config.sequence_parallel)
        with self.groups.active():
            run_microbatches(
                trained or self.module,
                [mb for _, mb in pieces],
                use_output,
                predict=None if self.part.shape.critic else stage.predictions,
                backward=trained is not None,
                width_multiple=self.groups.topology.tensor if cut_sequences else 1,
            )

    def _metrics(self, means: WeightedMeans) -> dict[str, float]:
        figures = means.result() if self.groups.is_last_stage else None
        return metrics_from_last_stage(figures, self.groups, self.device)

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        joined = torch.cat(outputs) if self.groups.is_last_stage else None
        return tensor_from_last_stage(joined, self.groups, self.device)

    # ---- weights ------------------------------------------------------------------------------

    def held_weights(self) -> Mapping[str, Sequence[tuple[Box, Tensor]]]:
        return self._computing()

    def _computing(self) -> Mapping[str, Sequence[tuple[Box, Tensor]]]:
        self.require_onloaded("held_weights")
        return views_of(self.module, self.part.holdings[self.rank])

    def weights_changed(self) -> None:
        self._replica_is_old = True

    def whole_module(self) -> nn.Module:
        """Returns a Hugging Face module, refreshed if weights have changed (collective over the slot)."""
        self.require_onloaded("generate")
        if self._replica is None:
            self._replica = plain_module(self.part.source)
        if self._replica_is_old:
            own = dict(self._replica.named_parameters())
            for name, weight in self._gathered():
                own[name].data.copy_(weight)
            self._replica_is_old = False
        return self._replica

    def _gathered(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        topo = self.groups.topology
        slot = [self.part.holdings[rank] for rank in topo.slot(self.groups.coordinate[1])]
        weights = self.part.shape.weights()
        return gather_weights(self._computing(), weights, slot, self.groups.slot, wanted=wanted)

    def save_to_hf(self, *, tokenizer: Any, save_dir: str) -> None:
        if self.groups.coordinate[1] == 0:  # one slot has the whole model
            weights = self.part.shape.weights()
            dtype = next(self.module.parameters()).dtype
            writes = self.rank == 0
            save_streamed(
                skeleton_of(self.part.source) if writes else None,
                tokenizer,
                save_dir,
                kinds={weight.name: WeightSpec(weight.shape, dtype) for weight in weights},
                weights=self._gathered(wanted=writes),
                writes=writes,
            )
        # All ranks wait until the directory is complete.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.groups.copy)

    # ---- memory -------------------------------------------------------------------------------

    def drop_copies(self) -> None:
        self._replica, self._replica_is_old = None, True

    def own_memory(self) -> list[Tensor]:
        """Lists all tensors that this engine keeps between two calls."""
        return [p.data for p in self.module.parameters()]


class MegatronInferenceEngine(ForwardOnly, StageEngine):
    """Engine with ``forward``, ``eval_batch``, ``generate`` and ``save_to_hf``; can't train."""

    trained_by = "megatron"


# ---- Broadcasts results of the last pipeline stage to all processes of the slot.
#
# Its first tensor rank sends. The others compute the same, but a GPU may round differently, and decisions
# based on a figure must be equal everywhere. Plain tensors are sent, nothing is pickled.


_DTYPES = tuple(DTYPE_NAMES)


def metrics_from_last_stage(
    figures: Mapping[str, float] | None, groups: MegatronGroups, device: torch.device
) -> dict[str, float]:
    """Broadcasts the last stage's ``figures`` (others pass None), bit for bit."""
    text = json.dumps(figures).encode()
    carrier = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    told = tensor_from_last_stage(None if figures is None else carrier, groups, device)
    return dict(json.loads(bytes(told.tolist())))


def tensor_from_last_stage(
    x: Tensor | None, groups: MegatronGroups, device: torch.device
) -> Tensor:
    """Broadcasts the last stage's ``x`` (1 to 6 dimensions; other stages pass None)."""
    if x is not None and dist.get_world_size(groups.slot) == 1:
        return x
    header = torch.zeros(8, dtype=torch.int64, device=device)
    if x is not None:
        header[: 2 + x.ndim] = torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape])
    _broadcast(header, groups)
    dtype, ndim, *shape = header.tolist()
    told = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device) if x is None else x
    told = told.contiguous()
    _broadcast(told.view(torch.uint8), groups)  # not every backend supports every dtype
    return told


def _broadcast(x: Tensor, groups: MegatronGroups) -> None:
    topo = groups.topology
    head = (topo.pipeline - 1) * topo.tensor  # rank in the slot, which is ordered by stage
    dist.broadcast(x, group=groups.slot, group_src=head)
