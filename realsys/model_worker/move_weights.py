"""Moves weights between the copies of a role, as requested by hooks (this worker's part).

Every worker that holds a part of either copy derives the same plan from the backends' layouts and
carries out its own part of it (realsys/weights/realloc).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from realsys.api import registry
from realsys.api.errors import CheckpointError
from realsys.api.model import ModelName, ModuleSource, PipelinableEngine
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.weights.layouts.boxes import Layout
from realsys.weights.realloc.disk import DiskReallocator
from realsys.weights.realloc.links import Link
from realsys.weights.realloc.realloc import Reallocator, ReallocReport
from realsys.weights.realloc.realloc_plan import ReallocPlan, plan_realloc, sent_dtypes
from realsys.weights.sync.plan_publish import weights_of

if TYPE_CHECKING:
    from realsys.model_worker.shards import Shards

DISK_TIMEOUT_S = 1800.0


class WeightMoves:
    """Carries out this worker's part of weight movements.

    Args:
        workers: all model workers of the experiment, with their shards and backends.
        make_link: opens the link to other workers; called after the process groups exist.
        folder: move weights through this folder instead; all workers must see it.
    """

    def __init__(
        self,
        shards: Shards,
        workers: Sequence[ModelWorker],
        *,
        worker: int,
        make_link: Callable[[], Link],
        folder: Path | None = None,
    ) -> None:
        self._shards, self._worker = shards, worker
        self._make_link, self._folder = make_link, folder
        self._held: dict[str, dict[int, tuple[int, ModelShard]]] = {}  # name → rank → worker, shard
        for index, config in enumerate(workers):
            for shard in config.shards:
                ranks = self._held.setdefault(str(shard.id.model_name), {})
                ranks[shard.id.parallelism_rank] = index, shard
        self._plans: dict[tuple[str, str, bool], ReallocPlan] = {}
        self._in_memory: Reallocator | None = None
        self._on_disk: dict[tuple[str, str], DiskReallocator] = {}

    def move(self, source: str, target: str, *, eta: float) -> ReallocReport:
        """Sets target ← eta · source + (1 − eta) · target; both are named ``role@replica``.

        Raises:
            WaitTimeout, WorkerLost: names the worker that did not complete its part.
        """
        source_engine, target_engine = self._engine(source), self._engine(target)
        # A model without weights: nothing to move
        if source_engine is None and target_engine is None:
            return ReallocReport(bytes_sent=0, bytes_received=0, bytes_copied=0)
        report = self._reallocator(source, target).run(
            self._plan(source, target, source_engine or target_engine),
            source_engine.held_weights() if source_engine else None,
            target_engine.held_weights() if target_engine else None,
            eta=eta,
        )
        if target_engine is not None:
            target_engine.weights_changed()
        return report

    def close(self) -> None:
        """Removes the files of the last transfers. To be called when no worker moves weights any more."""
        for mover in self._on_disk.values():
            mover.close()

    def _reallocator(self, source: str, target: str) -> Reallocator | DiskReallocator:
        """Returns the reallocator: a shared one in memory; on disk one per pair, which counts its
        transfers.
        """
        if self._folder is None:
            self._in_memory = self._in_memory or Reallocator(self._worker, self._make_link())
            return self._in_memory
        pair = source, target
        if pair not in self._on_disk:
            own = self._folder / f"{source}-{target}"
            self._on_disk[pair] = DiskReallocator(self._worker, own, timeout_s=DISK_TIMEOUT_S)
        return self._on_disk[pair]

    def _plan(self, source: str, target: str, engine: PipelinableEngine | None) -> ReallocPlan:
        """Plans the transfer of all weights; after the first, only of adapters if nothing else is
        trained.
        """
        adapters: frozenset[str] = getattr(engine, "adapter_names", frozenset())
        adapters_only = bool(adapters) and (source, target, False) in self._plans
        if (source, target, adapters_only) not in self._plans:
            of = self._source_of(source, target)
            source_layout, target_layout = self._layout(source, of), self._layout(target, of)
            dtype, rounded = sent_dtypes(
                self._dtypes(source, source_layout), self._dtypes(target, target_layout)
            )
            self._plans[source, target, adapters_only] = plan_realloc(
                weights_of(target_layout),
                source_layout,
                self._workers(source),
                target_layout,
                self._workers(target),
                dtype=dtype,
                rounded=rounded,
                names=adapters if adapters_only else None,
            )
        return self._plans[source, target, adapters_only]

    def _source_of(self, *names: str) -> ModuleSource:
        """Source with the weights' names and shapes, from the copy that this worker holds."""
        return next(s for name, s in self._shards.sources.items() if str(name) in names)

    def _layout(self, name: str, of: ModuleSource) -> Layout:
        _, shard = self._held[name][0]
        return registry.make_backend(shard.backend).layout(of, shard.id.topo)

    def _dtypes(self, name: str, layout: Layout) -> dict[str, str]:
        """Dtype in which a copy holds each weight, by weight name."""
        _, shard = self._held[name][0]
        return {w.name: self._shards.held_dtype(shard, w.name) for w in weights_of(layout)}

    def _workers(self, name: str) -> list[int]:
        ranks = self._held[name]
        return [ranks[rank][0] for rank in sorted(ranks)]

    def _engine(self, name: str) -> PipelinableEngine | None:
        """Engine of the copy's part on this worker, moved back from CPU memory; None if it has none."""
        found: dict[ModelName, Any] = self._shards.models
        engine = next((m.module for n, m in found.items() if str(n) == name), None)
        if engine is not None:
            engine.onload()
        return engine


def copy_weights(engine: PipelinableEngine) -> dict[str, list[torch.Tensor]]:
    """Copies all weights that ``engine`` holds to the CPU."""
    held = engine.held_weights()
    return {name: [view.to("cpu", copy=True) for _, view in parts] for name, parts in held.items()}


def restore_weights(engine: PipelinableEngine, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Restores weights that ``copy_weights`` returned.

    Raises:
        CheckpointError: they belong to another model or layout.
    """
    held = engine.held_weights()
    for name, parts in held.items():
        copies = saved.get(name, ())
        if [v.shape for _, v in parts] != [c.shape for c in copies]:
            raise CheckpointError(
                f"the saved weight {name} has another shape than here",
                where="weights of an averaged model",
                fix="resume with the plan that wrote the checkpoint",
            )
        for (_, view), copy in zip(parts, copies, strict=True):
            view.copy_(copy)
    engine.weights_changed()
