"""Publishes the weights of this worker's models for generation servers: who gives what, and a copy of it.

Every worker that holds a part of a model works out the same from the plan and the backends' layouts; no
worker asks another. realsys/weights/sync does the rest.
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
from realsys.weights.sync.plan_publish import Giving, plan_publish, weights_of, wire_dtypes
from realsys.weights.sync.publisher import PublishedVersion, WeightPublisher

if TYPE_CHECKING:
    from realsys.model_worker.shards import Shards


class WeightPublications:
    """What this worker has published, by model.

    Args:
        workers: all model workers of the experiment: who holds which shard, with which backend.
        store: behind this worker's tensor server under ``weight_sync.manifest.KEY``, and nothing else
            in it: a checkpoint saves the other one.
        wire_dtype: weights are given in this dtype (``bfloat16``); empty: in what the model computes in.
        delta: give what changed since the version before, where that is little.
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
                f"weights can't be given in dtype {wire_dtype!r}",
                where="publishing weights",
                fix="use one of " + ", ".join(DTYPE_BYTES),
            )
        self._shards, self._workers, self._worker = shards, workers, worker
        self._store, self._wire_dtype, self._delta = store, wire_dtype, delta
        self._publishers: dict[str, WeightPublisher] = {}

    def publish(self, model: str, version: int, *, among: tuple[int, ...] = ()) -> PublishedVersion:
        """Copies this worker's part of ``model`` (``role@replica``) as ``version``, for servers to fetch.

        To be called on every worker that holds a part of the model, between two updates of it. Not
        collective: no worker waits for another.

        Args:
            among: workers that give the whole model together; none: all that hold a part.
        Raises:
            InternalError: ``version`` is not newer than the one before.
        """
        if among and self._worker not in among:
            return PublishedVersion()
        name = self._shards.find(model)
        engine: PipelinableEngine = self._shards.models[name].module
        engine.onload()  # a hook may have left it in CPU memory
        of_all = sorted(worker for worker, _ in self._holders(name))
        key = model if not among or sorted(among) == of_all else f"{model}+{_spelled(among)}"
        if key not in self._publishers:
            self._publishers[key] = self._publisher(name, engine, key, among)
        return self._publishers[key].publish(engine, version)

    def _publisher(
        self, name: ModelName, engine: PipelinableEngine, key: str, among: Collection[int]
    ) -> WeightPublisher:
        adapters, giving = getattr(engine, "adapters", None), self._giving(name, among)
        _, shard = self._holders(name)[0]
        return WeightPublisher(
            self._store,
            giving,
            model=key,
            worker=self._worker,
            trained=getattr(engine, "adapter_names", frozenset()),
            adapter_scale=adapters.alpha / adapters.rank if adapters is not None else 0.0,
            may_round=any(
                self._shards.held_dtype(shard, weight) != dtype
                for weight, dtype in giving.dtypes.items()
            ),
            delta=self._delta,
        )

    def _giving(self, name: ModelName, among: Collection[int]) -> Giving:
        held = self._holders(name)
        _, shard = held[0]
        backend = registry.make_backend(shard.backend)
        layout = backend.layout(self._shards.sources[name], shard.id.topo)
        dtypes = wire_dtypes(
            weights_of(layout),
            dtype=str(shard.model.args.get("dtype", "float32")),
            wire=self._wire_dtype,
        )
        givers = [i for i, (worker, _) in enumerate(held) if not among or worker in among]
        return plan_publish(
            tuple(layout[i] for i in givers), [held[i][0] for i in givers], dtypes=dtypes
        )

    def _holders(self, name: ModelName) -> list[tuple[int, ModelShard]]:
        """(worker, its shard) of a model, by parallelism rank."""
        found = [
            (index, shard)
            for index, config in enumerate(self._workers)
            for shard in config.shards
            if shard.id.model_name == name
        ]
        return sorted(found, key=lambda held: held[1].id.parallelism_rank)


def _spelled(workers: Collection[int]) -> str:
    return ".".join(map(str, sorted(workers)))
