"""Main loop of a model worker: runs ordered requests one by one, keeps tensors, replies metadata.

    take next request → get missing tensors from peers → interface on engine → keep outputs → reply

This is the compute thread; requests come from control.py, tensors leave through
realsys/data/transfer/tensor_server.py, both on threads of their own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from realsys.api import registry
from realsys.api.data import SequenceMeta
from realsys.api.dataflow import MFCDef
from realsys.api.errors import GradientNotFinite, InternalError
from realsys.api.model import (
    SKIPPED_STEPS,
    Model,
    ModelInterface,
    ModelInterfaceType,
    PipelinableEngine,
)
from realsys.api.worker_configs import ModelShard, ModelWorker
from realsys.data.packing import contiguous
from realsys.data.sequence_sample import SequenceSample
from realsys.data.transfer.tensor_client import TensorClient
from realsys.data.transfer.tensor_store import TensorStore
from realsys.devices.streams import finish
from realsys.model_worker.move_weights import WeightMoves
from realsys.model_worker.ordered_requests import OrderedRequests
from realsys.model_worker.out_of_memory import explain_out_of_memory
from realsys.model_worker.publishing import WeightPublications
from realsys.model_worker.recovery import hash_file, load_state, save_state
from realsys.model_worker.shards import Shards
from realsys.model_worker.skipped_batches import keep_batch
from realsys.runtime.lifecycle import WorkerEvent
from realsys.transport import worker_requests as rq
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 600.0
IDLE_POLL_S = 1.0
BETWEEN_STEPS_S = 1800.0  # limit on requests between steps, which report no progress
FIRST_REQUEST_S = 600.0
_STEP_REQUESTS = (rq.Fetch, rq.RunCall, rq.Reallocate, rq.Offload, rq.PublishWeights)


@dataclass(eq=False, repr=False)
class ModelWorkerLoop:
    """Serves ordered requests until asked to exit. Created and run by ``build.run``."""

    runner: WorkerRunner
    _: KW_ONLY
    shards: Shards
    weights: WeightMoves
    publications: WeightPublications
    tensors: TensorStore
    ordered: OrderedRequests
    connect_to: Callable[[str], None]
    make_groups: Callable[[], Any]
    make_client: Callable[[tuple[str, ...]], TensorClient]

    def __post_init__(self) -> None:
        self._config: ModelWorker = self.runner.config
        self._client: TensorClient | None = None
        self._dataset: Any = None
        self._first_done: dict[tuple[Any, ...], int] = {}  # kind of request → step
        self._eval_sets: dict[str, list[SequenceSample]] = {}
        self._handlers: dict[type, Callable[[Any], Any]] = {
            rq.Setup: self._setup,
            rq.Initialize: self._initialize,
            rq.Fetch: self._fetch,
            rq.RunCall: self._run_call,
            rq.Reallocate: self._reallocate,
            rq.Offload: self._offload,
            rq.PublishWeights: self._publish_weights,
            rq.Evaluate: self._evaluate,
            rq.SaveModel: self._save_model,
            rq.SaveRecover: self._save_recover,
            rq.HashRecover: self._hash_recover,
            rq.LoadRecover: self._load_recover,
        }

    def run(self) -> None:
        """Serves requests until the master sends ``Exit``.

        A request that fails is answered with its error, which is then raised.
        """
        while not self.ordered.closed:
            self.runner.between_requests(until=lambda: self.ordered.closed)
            ordered = self.ordered.take(IDLE_POLL_S)
            if ordered is None:
                continue
            request = ordered.request
            name = getattr(request, "call", type(request).__name__)
            step = getattr(request, "step", 0)
            self.runner.set_log_step(step)
            may_take_s = self._stall_limit_s(request)
            self.runner.move(WorkerEvent.STARTED, mfc=name, step=step, may_take_s=may_take_s)
            try:
                reply = self._handlers[type(request)](request)
            except Exception as error:
                reported = explain_out_of_memory(
                    error, doing=name, worker=self.runner.index, config=self.runner.phase.config
                )
                ordered.reply.set_exception(reported)
                if reported is error:
                    raise
                raise reported from error
            ordered.reply.set_result(reply)
            self.runner.move(WorkerEvent.FINISHED_CALL, step=step)

    def _stall_limit_s(self, request: Any) -> float:
        """Time limit of a request without progress, in seconds; 0 uses the limit learnt from earlier steps.

        The first request of a kind loads kernels and lets NCCL connect its groups; in the first
        step nothing has been learnt yet.
        """
        if not isinstance(request, _STEP_REQUESTS):
            return BETWEEN_STEPS_S
        if isinstance(request, rq.Fetch):
            return 0.0
        kind = (type(request), getattr(request, "call", ""), getattr(request, "target", ""))
        first_step = next(iter(self._first_done.values()), request.step)
        is_new = self._first_done.setdefault(kind, request.step) == request.step
        return FIRST_REQUEST_S if is_new and request.step > first_step else 0.0

    # ---- set-up -----------------------------------------------------------------------------

    def _setup(self, request: rq.Setup) -> rq.SetupDone:
        self._client = self.make_client(request.data_endpoints)
        self.connect_to(request.rendezvous)
        self.shards.make_models(self.make_groups())
        if self._loads_dataset():
            (abstraction,) = self._config.datasets
            self._dataset = registry.make_dataset(
                abstraction, tokenizer=self._tokenizer(), seed=self._config.base_seed
            )
        size = None if self._dataset is None else len(self._dataset)
        models = ",".join(map(str, self.shards.models))
        logger.info("models made models=%s dataset=%s", models, size)
        keys = () if self._dataset is None else tuple(self._dataset.keys)
        return rq.SetupDone(
            dataset_size=size or 0,
            dataset_keys=keys,
            source_items=getattr(self._dataset, "source_items", {}),
        )

    def _loads_dataset(self) -> bool:
        """True if this worker loads the data set: it has a data-parallel head of a source call,

        and datapoints don't come from rollout workers.
        """
        if not self._config.datasets:
            return False
        made = {key for call in self._config.model_rpcs for key in call.output_keys}
        sources = {
            call.model_name
            for call in self._config.model_rpcs
            if not made.intersection(call.input_keys)
        }
        return any(
            shard.id.model_name in sources
            and shard.id.parallelism_rank in shard.id.topo.data_parallel_heads()
            for shard in self._config.shards
        )

    def _tokenizer(self) -> Any:
        """Returns the tokenizer of this worker's first model that has one."""
        for model in self.shards.models.values():
            if model.tokenizer is not None:
                return model.tokenizer
        raise InternalError("no model here has a tokenizer", where=self.runner.name)

    def _initialize(self, request: rq.Initialize) -> rq.Done:
        self.shards.initialize(request.spec)
        return rq.Done()

    # ---- a step -----------------------------------------------------------------------------

    def _fetch(self, request: rq.Fetch) -> rq.Fetched:
        sample = self._dataset.batch(request.indices, request.ids)
        self.tensors.put(sample)
        return rq.Fetched(meta=sample.meta)

    def _run_call(self, request: rq.RunCall) -> rq.CallDone:
        call, model, interface = self.shards.call(request.call)
        started = time.time()
        self._fetch_from_peers(request)
        sample = self.tensors.get(request.meta.select(call.input_keys))
        if isinstance(model.module, PipelinableEngine):
            model.module.onload()
        compute_started = time.perf_counter()
        batch = sample.remap(call.input_key_remap)
        try:
            stats, output = _compute(call, model, interface, batch)
        except GradientNotFinite:
            self._keep_batch(request, model, batch)
            raise
        if stats.get(SKIPPED_STEPS):
            self._keep_batch(request, model, batch)
        finish(model.device)  # so that pending kernels are not timed as the next call's
        compute_s = time.perf_counter() - compute_started
        meta = self._store_output(call, output) if output is not None else None
        is_head = model.rank in model.topology.data_parallel_heads()
        return rq.CallDone(
            meta=meta if is_head else None,
            kept=meta is not None,
            is_head=is_head,
            stats=stats,
            started=started,
            ended=time.time(),
            compute_s=compute_s,
            tokens=sum((output or sample).meta.tokens_per_id()),
        )

    def _keep_batch(self, request: rq.RunCall, model: Model, batch: SequenceSample) -> None:
        """Keeps a batch with a step that was left out, where its data-parallel rank has it first."""
        if model.rank in model.topology.data_parallel_heads():
            keep_batch(
                self.runner.phase_files.skipped_batches,
                batch,
                call=request.call,
                step=request.step,
                worker=self.runner.name,
            )

    def _reallocate(self, request: rq.Reallocate) -> rq.Moved:
        started = time.time()
        with self.runner.waiting_for(f"weights {request.source} → {request.target}"):
            report = self.weights.move(request.source, request.target, eta=request.eta)
        return rq.Moved(
            started=started,
            ended=time.time(),
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
        )

    def _offload(self, request: rq.Offload) -> rq.Moved:
        started = time.time()
        self.shards.models[self.shards.find(request.model)].module.offload()
        return rq.Moved(started=started, ended=time.time())

    def _publish_weights(self, request: rq.PublishWeights) -> rq.Published:
        started = time.time()
        published = [
            self.publications.publish(request.model, request.version, among=group)
            for group in request.groups or ((),)
        ]
        return rq.Published(
            names=tuple(part.name for part in published),
            started=started,
            ended=time.time(),
            num_bytes=sum(part.num_bytes for part in published),
        )

    def _fetch_from_peers(self, request: rq.RunCall) -> None:
        if request.sources:
            assert self._client is not None  # made by Setup, the first ordered request
            self._client.fetch_all(
                request.sources, timeout_s=TRANSFER_TIMEOUT_S, waiting_for=self.runner.waiting_for
            )

    def _store_output(self, call: MFCDef, output: SequenceSample) -> SequenceMeta:
        output = output.remap(
            {k: v for k, v in call.output_key_remap.items() if k in output.keys}
        ).select(call.output_keys)
        self.tensors.put(output)
        return output.meta

    # ---- between steps ----------------------------------------------------------------------

    def _evaluate(self, request: rq.Evaluate) -> rq.Evaluated:
        stats: dict[str, dict[str, float]] = {}
        samples: tuple[Any, ...] = ()
        for shard, model, interface, mb_spec in self.shards.evaluated():
            if isinstance(model.module, PipelinableEngine):
                model.module.onload()
            found = interface.evaluate(model, self._eval_batches(shard, model), mb_spec)
            if isinstance(model.module, PipelinableEngine) and not self.shards.generates(
                model.name
            ):
                model.module.drop_copies()  # gathered whole weights would stay allocated during training
            samples += tuple(found.pop("samples", ()))
            stats[shard.id.model_name.role] = found
        return rq.Evaluated(stats=stats, samples=samples)

    def _eval_batches(self, shard: ModelShard, model: Model) -> Iterator[SequenceSample]:
        """Batches of the held-out data of this data-parallel rank, made once per shard."""
        name = str(shard.id)
        if name not in self._eval_sets:
            assert shard.eval_dataset is not None
            dataset = registry.make_dataset(
                shard.eval_dataset, tokenizer=model.tokenizer, seed=self._config.base_seed
            )
            _, data_rank, _ = shard.id.topo.coordinate(shard.id.parallelism_rank)
            mine = range(data_rank, len(dataset), shard.id.topo.data)
            # Same number of batches on every rank: an engine's forward may be collective.
            most = math.ceil(len(dataset) / shard.id.topo.data)
            parts = contiguous(len(mine), math.ceil(most / shard.eval_bs))
            self._eval_sets[name] = [
                dataset.batch([mine[i] for i in part], [f"eval-{mine[i]}" for i in part])
                for part in parts
            ]
        return iter(self._eval_sets[name])

    def _save_model(self, request: rq.SaveModel) -> rq.Done:
        model, interface = self.shards.model(request.model)
        if isinstance(model.module, PipelinableEngine):
            model.module.onload()
        interface.save(model, request.folder)
        return rq.Done()

    def _save_recover(self, request: rq.SaveRecover) -> rq.RecoverSaved:
        name = self.runner.name.replace("/", "-") + ".pt"
        # Tensors present between two steps belong to a step that was started ahead of time.
        state = {"shards": self.shards.state_dict(), "tensors": self.tensors.state_dict()}
        digest, num_bytes = save_state(state, Path(request.folder) / name)
        return rq.RecoverSaved(file=name, sha256=digest, num_bytes=num_bytes)

    def _hash_recover(self, request: rq.HashRecover) -> rq.RecoverHashed:
        digest, why = hash_file(Path(request.file))
        return rq.RecoverHashed(sha256=digest, why=why)

    def _load_recover(self, request: rq.LoadRecover) -> rq.Done:
        state = load_state(Path(request.file))
        self.shards.load_state_dict(state["shards"], where=request.file)
        held = state["tensors"]
        if request.keep is not None:
            held = {name: held[name] for name in request.keep}
        self.tensors.load_state_dict(held)
        return rq.Done()


def _compute(
    call: MFCDef, model: Model, interface: ModelInterface, sample: SequenceSample
) -> tuple[dict[str, float], SequenceSample | None]:
    """Runs the interface's method; returns (statistics, None) or ({}, new keys)."""
    if call.interface_type is ModelInterfaceType.TRAIN_STEP:
        stats = interface.train_step(model, sample, call.mb_spec)
        if call.log_return_value:
            logger.info("call returned name=%s %s", call.name, stats)
        return stats, None
    method = getattr(interface, call.interface_type.value)
    return {}, method(model, sample, call.mb_spec)
