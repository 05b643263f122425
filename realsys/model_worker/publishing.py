"""Publishes this worker's model weights for generation servers: which worker serves which part, and
a copy of it.

Every worker that holds a part of a model derives the same assignment from the plan and the backends'
layouts, without communication. realsys/weights/sync does the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.api.model import ModelName, PipelinableEngine
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.data.transfer.tensor_store import TensorStore
from realsys.models.shape import DTYPE_BYTES
from realsys.weights.sync.plan_publish import PublishPlan, plan_publish, weights_of, wire_dtypes
from realsys.weights.sync.publisher import PublishedVersion, WeightPublisher

if TYPE_CHECKING:
    from realsys.model_worker.shards import Shards


class WeightPublications:
    """Weights that this worker has published, by model.

    Args:
        workers: all model workers of the experiment, with their shards and backends.
        store: served by this worker's tensor server under ``weights.sync.manifest.KEY``; holds only
            published weights, which checkpoints leave out.
        wire_dtype: dtype of published weights (``bfloat16``); empty: the model's compute dtype.
        delta: publish only what changed since the previous version if that is small.
    """

    def __init__(
        self,
        shards: Shards,
        workers: Sequence[ModelWorker],
        *,
        worker: int,
        store: TensorStore,
        wire_dtype: str = "",
        delta: bool = False,
    ) -> None:
        if wire_dtype and wire_dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"weights can't be published in dtype {wire_dtype!r}",
                where="publishing weights",
                fix="use one of " + ", ".join(DTYPE_BYTES),
            )
        self._shards, self._workers, self._worker = shards, workers, worker
        self._store, self._wire_dtype, self._delta = store, wire_dtype, delta
        self._publishers: dict[str, WeightPublisher] = {}

    def publish(self, model: str, version: int, *, among: tuple[int, ...] = ()) -> PublishedVersion:
        """Copies this worker's part of ``model`` (``role@replica``) as ``version``, for servers to fetch.

        Must be called on every worker that holds a part of the model, between two updates of it. Not
        collective: no worker waits for another.

        Args:
            among: workers that together publish the whole model; empty: all that hold a part.
        Raises:
            InternalError: ``version`` is not newer than the previous one.
        """
        if among and self._worker not in among:
            return PublishedVersion()
        name = self._shards.find(model)
        engine: PipelinableEngine = self._shards.models[name].module
        engine.onload()  # a hook may have offloaded it
        of_all = sorted(worker for worker, _ in self._holders(name))
        key = model if not among or sorted(among) == of_all else f"{model}+{_joined(among)}"
        if key not in self._publishers:
            self._publishers[key] = self._publisher(name, engine, key, among)
        return self._publishers[key].publish(engine, version)

    def _publisher(
        self, name: ModelName, engine: PipelinableEngine, key: str, among: Collection[int]
    ) -> WeightPublisher:
        adapters, publish_plan = getattr(engine, "adapters", None), self._publish_plan(name, among)
        _, shard = self._holders(name)[0]
        return WeightPublisher(
            self._store,
            publish_plan,
            model=key,
            worker=self._worker,
            trained=getattr(engine, "adapter_names", frozenset()),
            adapter_scale=adapters.alpha / adapters.rank if adapters is not None else 0.0,
            may_round=any(
                self._shards.held_dtype(shard, weight) != dtype
                for weight, dtype in publish_plan.dtypes.items()
            ),
            delta=self._delta,
        )

    def _publish_plan(self, name: ModelName, among: Collection[int]) -> PublishPlan:
        held = self._holders(name)
        _, shard = held[0]
        backend = registry.make_backend(shard.backend)
        layout = backend.layout(self._shards.sources[name], shard.id.topo)
        dtypes = wire_dtypes(
            weights_of(layout),
            dtype=str(shard.model.args.get("dtype", "float32")),
            wire=self._wire_dtype,
        )
        ranks = [i for i, (worker, _) in enumerate(held) if not among or worker in among]
        return plan_publish(
            tuple(layout[i] for i in ranks), [held[i][0] for i in ranks], dtypes=dtypes
        )

    def _holders(self, name: ModelName) -> list[tuple[int, ModelShard]]:
        """Workers that hold a model, as (worker, its shard), by parallelism rank."""
        found = [
            (index, shard)
            for index, config in enumerate(self._workers)
            for shard in config.shards
            if shard.id.model_name == name
        ]
        return sorted(found, key=lambda held: held[1].id.parallelism_rank)


def _joined(workers: Collection[int]) -> str:
    return ".".join(map(str, sorted(workers)))
