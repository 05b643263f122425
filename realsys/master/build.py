"""Sets up the master: finds the workers, initialises them, resumes, and starts the main loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from realsys.api.dataflow import DataflowGraph
from realsys.api.errors import CheckpointError, ConfigError
from realsys.api.model import FinetuneSpec, ModelName
from realsys.api.plain import to_plain
from realsys.api.worker_configs import RolloutControl
from realsys.master.checkpoint import recover
from realsys.master.checkpoint.publication import Publisher
from realsys.master.graph.buffer import AsyncIOSequenceBuffer
from realsys.master.graph.curriculum import Curriculum
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.graph.dynamic_sampling import DynamicSampling
from realsys.master.graph.feeds import Feed, Records, StoredFeed, recorded_steps
from realsys.master.graph.function_executor import AfterCall, FunctionExecutor, calls_to_rewards
from realsys.master.graph.idle import pools_of
from realsys.master.graph.master_state import MasterState, read_state
from realsys.master.graph.model_function_call import ModelFunctionCall, placement_of
from realsys.master.graph.model_workers import ModelWorkers
from realsys.master.graph.peer_watch import PeerWatch
from realsys.master.graph.storage_tracker import StorageTracker
from realsys.master.graph.weight_hooks import WeightHooks
from realsys.master.master_worker import MasterWorkerLoop, RunFiles
from realsys.master.rollouts.rollout_service import RolloutService
from realsys.master.run_progress import ProgressBoard
from realsys.observability.events import EventLog
from realsys.observability.jsonl import JsonlAppender
from realsys.observability.metrics import MetricsWriter, source_of
from realsys.runtime.lifecycle import WorkerEvent
from realsys.transport import worker_requests as rq
from realsys.trial.lineage import Lineage
from realsys.trial.records import Resumed, StopRequest
from realsys.worker.runner import WorkerRunner, channel_identity

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 300.0
SETUP_TIMEOUT_S = 1800.0
LOOKS = 5  # tries, at checkpoints that an older attempt may be removing


def run(runner: WorkerRunner) -> int:
    """Runs the master to its end; returns its exit code."""
    return asyncio.run(_run(runner))


async def _run(runner: WorkerRunner) -> int:
    if runner.config.rollout is None:
        await asyncio.to_thread(runner.register)
        return await _run_with(runner, None)
    async with RolloutService(runner, runner.config.rollout) as side:
        await asyncio.to_thread(runner.register, control=side.endpoint)
        return await _run_with(runner, side)


async def _run_with(runner: WorkerRunner, side: RolloutService | None) -> int:
    revision = await asyncio.to_thread(runner.revision)
    records = await asyncio.to_thread(
        runner.peers,
        "model_worker",
        runner.config.n_model_workers,
        timeout_s=REGISTER_TIMEOUT_S,
    )
    connections = ModelWorkers(records, sender=runner.name, **channel_identity(runner))
    event_loop = asyncio.get_running_loop()

    def on_ended(worker: str, reason: str) -> None:
        event_loop.call_soon_threadsafe(connections.fail, worker, reason)
        if side is not None:
            event_loop.call_soon_threadsafe(side.ended, worker, reason)

    peers = PeerWatch(
        runner.store,
        runner.keys,
        token=runner.attempt.token,
        from_revision=revision + 1,
        on_ended=on_ended,
    )
    async with connections as workers:
        with peers:
            return await _run_loop(runner, workers, side)


async def _run_loop(
    runner: WorkerRunner, workers: ModelWorkers, side: RolloutService | None
) -> int:
    loop = await _make_loop(runner, workers, side)

    def on_stop(request: StopRequest) -> None:
        loop.stop_requested = True

    runner.on_stop = on_stop
    runner.move(WorkerEvent.STARTED, mfc="main loop", may_take_s=loop.may_take_s)
    try:
        code = await loop.run()
    finally:
        loop.close()
    runner.move(WorkerEvent.FINISHED_CALL, step=loop.step)
    return code


async def _make_loop(
    runner: WorkerRunner, workers: ModelWorkers, side: RolloutService | None
) -> MasterWorkerLoop:
    graph = runner.phase.config.graph()
    dataset_size, source_items = await _set_up(workers, graph, side)
    total_steps = await _initialize(runner, workers, graph, dataset_size)
    publisher = Publisher(runner)
    step, state = await _resume(runner, workers, publisher)
    schedule = DataSchedule(
        dataset_size=dataset_size,
        batch_size=graph.sources[0].n_seqs,
        seed=runner.config.base_seed,
        shuffle=runner.config.shuffle_dataset,
    )
    curriculum = _make_curriculum(runner, schedule, source_items, state)
    feed: Feed
    after_call = sampling = None
    if side is not None:
        after_call = await side.start(
            workers,
            schedule,
            holders=_data_workers(graph, runner.config.msid2mwid),
            shards=runner.config.msid2mwid,
            trained_by=_trained_by(graph, runner.config.rollout),
            version=step or 0,
            total_steps=total_steps,
            saved=state.rollouts,
            curriculum=curriculum,
        )
        feed = side.desk
    else:
        sampling = _make_sampling(runner, graph, schedule, curriculum, step or 0, state)
        order = sampling.ask if sampling is not None else (curriculum or schedule).indexed_ids
        feed, total_steps = await _data_feed(runner, workers, graph, order, total_steps)
    progress = ProgressBoard(runner, total_steps=total_steps)
    progress.step = step or 0
    progress.publish("starting")
    executor = _make_executor(
        runner,
        workers,
        graph,
        feed,
        progress,
        last_step=total_steps,
        after_call=after_call,
        sampling=sampling,
    )
    if state.ahead is not None:
        executor.restore_prefetched(state.ahead)
    return MasterWorkerLoop(
        runner,
        executor=executor,
        workers=workers,
        schedule=schedule,
        curriculum=curriculum,
        sampling=sampling,
        files=_open_files(runner, step, publisher.lineage),
        progress=progress,
        publisher=publisher,
        rollouts=side,
        saved_models=tuple(n.model_name for n in graph.nodes if n.is_train),
        evaluated=_evaluated(runner),
        total_steps=total_steps,
        step=step or 0,
    )


def _make_curriculum(
    runner: WorkerRunner,
    schedule: DataSchedule,
    source_items: Mapping[str, int],
    state: MasterState,
) -> Curriculum | None:
    """Makes what chooses the records of a run with a curriculum, as far as the checkpoint has it."""
    config = runner.config
    if config.curriculum is None:
        return None
    curriculum = Curriculum(
        source_items,
        control=config.curriculum,
        batch_size=schedule.batch_size,
        lag=config.max_staleness if config.rollout is None else config.rollout.max_staleness,
        seed=schedule.seed,
        shuffle=schedule.shuffle,
    )
    if state.curriculum is not None:
        curriculum.restore(state.curriculum)
    return curriculum


def _make_sampling(
    runner: WorkerRunner,
    graph: DataflowGraph,
    schedule: DataSchedule,
    curriculum: Curriculum | None,
    step: int,
    state: MasterState,
) -> DynamicSampling | None:
    """Makes what chooses the questions that a step trains on, as far as the checkpoint has it."""
    control = runner.config.dynamic_sampling
    if control is None:
        return None
    first = graph[calls_to_rewards(graph)[0]]
    topo, _ = placement_of(first, runner.config.msid2mwid)
    sampling = DynamicSampling(
        (lambda step, number: schedule.at(number))
        if curriculum is None
        else (lambda step, number: curriculum.draw(step)),
        control=control,
        batch_size=schedule.batch_size,
        # So each rank has as many as the others, and enough for its micro-batches.
        unit=topo.data * first.mb_spec.n_mbs,
        drawn=step * schedule.batch_size,
    )
    if state.sampling is not None:
        sampling.restore(state.sampling)
    return sampling


async def _initialize(
    runner: WorkerRunner, workers: ModelWorkers, graph: DataflowGraph, dataset_size: int
) -> int:
    """Makes all workers create their engines for a run of this length; returns its number of steps."""
    ctrl, batch_size = runner.config.exp_ctrl, graph.sources[0].n_seqs
    spec = FinetuneSpec(
        total_train_epochs=ctrl.total_train_epochs,
        dataset_size=dataset_size,
        train_batch_size=batch_size,
        benchmark_steps=ctrl.benchmark_steps,
    )
    if spec.total_train_steps < 1:
        raise ConfigError(
            f"{ctrl.total_train_epochs} epochs of {dataset_size} records do not fill a batch of "
            f"{batch_size}",
            where="exp_ctrl.total_train_epochs and train_bs_n_seqs",
            fix="use a smaller batch, more records or more epochs",
        )
    await workers.call_all(
        partial(rq.Initialize, spec=spec), timeout_s=SETUP_TIMEOUT_S, what="initialize"
    )
    return spec.total_train_steps


async def _data_feed(
    runner: WorkerRunner,
    workers: ModelWorkers,
    graph: DataflowGraph,
    records: Records,
    total_steps: int,
) -> tuple[Feed, int]:
    """Returns the source of datapoints without rollout workers, and for how many steps it lasts."""
    data_workers = _data_workers(graph, runner.config.msid2mwid)
    if (replay := runner.config.replay) is None:
        return StoredFeed(records, workers, data_workers), total_steps
    steps = await asyncio.to_thread(recorded_steps, Path(replay))
    feed = StoredFeed(lambda step: [(0, name) for name in steps[step - 1]], workers, data_workers)
    return feed, min(total_steps, len(steps))


def _trained_by(graph: DataflowGraph, rollout: RolloutControl) -> str | None:
    """Returns the call whose new weights the servers get."""
    if not rollout.trains:
        return None
    return next(n.name for n in graph.nodes if n.is_train and n.model_name == rollout.model_name)


def _evaluated(runner: WorkerRunner) -> tuple[ModelName, ...]:
    """Returns the models that have held-out data."""
    shards = [s for w in runner.phase.config.model_worker for s in w.shards]
    names = [s.id.model_name for s in shards if s.eval_dataset is not None]
    return tuple(dict.fromkeys(names))


async def _set_up(
    workers: ModelWorkers, graph: DataflowGraph, side: RolloutService | None
) -> tuple[int, Mapping[str, int]]:
    """Sets up modules and data sets on every worker; returns the data set's size, of a mixture also by
    source.
    """
    endpoints = tuple(record.data for record in workers.records)
    replies: list[rq.SetupDone] = await workers.call_all(
        partial(rq.Setup, data_endpoints=endpoints, rendezvous=workers.records[0].rendezvous),
        timeout_s=SETUP_TIMEOUT_S,
        what="set-up",
    )
    if side is not None:
        return await side.desk.dataset_size(), side.desk.source_items
    found = next(reply for reply in replies if reply.dataset_keys)
    missing = sorted(graph.dataset_keys - set(found.dataset_keys))
    if missing:
        raise ConfigError(
            f"the data set makes {sorted(found.dataset_keys)}, the graph reads {missing}",
            where="ExperimentConfig.dataset_keys",
            fix="use a data set that makes these keys, or correct dataset_keys",
        )
    return found.dataset_size, found.source_items


async def _resume(
    runner: WorkerRunner, workers: ModelWorkers, publisher: Publisher
) -> tuple[int | None, MasterState]:
    """Loads the newest valid checkpoint; returns its step and the master's state."""
    names = [record.worker for record in workers.records]
    event_loop = asyncio.get_running_loop()

    def hashes_of(files: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
        asked = _hashes_of(workers, names, files)
        return asyncio.run_coroutine_threadsafe(asked, event_loop).result(SETUP_TIMEOUT_S)

    found, ours = await asyncio.to_thread(_take_checkpoint, runner, names, hashes_of)
    publisher.resumed(found)
    if found is None or ours is None:
        return None, MasterState()
    file = ours.files.get(recover.MASTER)
    state = MasterState() if file is None else await asyncio.to_thread(read_state, file)
    await workers.call(
        {
            worker: partial(rq.LoadRecover, file=str(ours.files[name]), keep=state.kept(worker))
            for worker, name in enumerate(names)
        },
        timeout_s=SETUP_TIMEOUT_S,
        what=f"load checkpoint of step {found.step}",
    )
    logger.info("resumed after_step=%d folder=%s", ours.step, ours.folder)
    return found.step, state


async def _hashes_of(
    workers: ModelWorkers, names: list[str], files: Mapping[str, Path]
) -> dict[str, tuple[str, str]]:
    """Returns each worker's hash of its file of a checkpoint; each reads it on its own host, all in
    parallel."""
    replies: dict[int, rq.RecoverHashed] = await workers.call(
        {names.index(name): partial(rq.HashRecover, file=str(f)) for name, f in files.items()},
        timeout_s=SETUP_TIMEOUT_S,
        what="check a checkpoint",
    )
    return {names[worker]: (reply.sha256, reply.why) for worker, reply in replies.items()}


def _take_checkpoint(
    runner: WorkerRunner, names: list[str], hashes_of: recover.HashesOf | None = None
) -> tuple[recover.RecoverCheckpoint | None, recover.RecoverCheckpoint | None]:
    """Returns the newest valid checkpoint and this attempt's copy of it.

    The copy is made before the resume record is published, because that record invalidates later writes
    of the older attempt.
    """
    for _ in range(LOOKS):
        resumed = recover.read_resumed(runner.trial_files, runner.phase.name)
        found = recover.newest_whole(
            runner.phase_files.recover,
            workers=names,
            lineage=Lineage.of(resumed),
            ledger_of=partial(_ledger_from, runner, resumed),
            hashes_of=hashes_of,
        )
        ours = found and recover.adopt(found, attempt=runner.attempt.number)
        if found is None or ours is not None:
            return found, ours
    raise CheckpointError(
        f"checkpoints vanished {LOOKS} times while they were being read",
        where=str(runner.phase_files.recover),
        fix="another attempt writes there: realsys status",
    )


def _ledger_from(
    runner: WorkerRunner, resumed: Mapping[int, Resumed], attempt: int, step: int
) -> Path:
    """Returns the ledger with which a run from that checkpoint would continue, chosen as in
    ``_open_files``."""
    me, files = runner.attempt.number, runner.phase_files
    ours = Resumed(attempt=me, phase=runner.phase.name, step=step, of_attempt=attempt)
    limits = Lineage.of({**resumed, me: ours}).limits
    return source_of(files, files.ledger, [n for n in limits if n != me])


def _make_executor(
    runner: WorkerRunner,
    workers: ModelWorkers,
    graph: DataflowGraph,
    feed: Feed,
    progress: ProgressBoard,
    *,
    last_step: int,
    after_call: AfterCall | None,
    sampling: DynamicSampling | None,
) -> FunctionExecutor:
    buffer, storage = AsyncIOSequenceBuffer(graph), StorageTracker()
    shards = runner.config.msid2mwid
    hooks = WeightHooks(shards)
    calls = []
    for node in graph.nodes:
        topo, placement = placement_of(node, shards)
        calls.append(
            ModelFunctionCall(
                node,
                topo=topo,
                placement=placement,
                buffer=buffer,
                storage=storage,
                workers=workers,
                hooks=hooks,
                on_change=progress.call_changed,
            )
        )
    return FunctionExecutor(
        graph,
        calls=calls,
        buffer=buffer,
        storage=storage,
        workers=workers,
        hooks=hooks,
        feed=feed,
        after_call=after_call,
        pools=runner.phase.config.pools or pools_of(shards),
        max_staleness=runner.config.max_staleness,
        last_step=last_step,
        sampling=sampling,
    )


def _data_workers(graph: DataflowGraph, shards: Any) -> list[int]:
    """Returns the workers where datapoints enter: the data-parallel heads of the first source call's
    model."""
    topo, placement = placement_of(graph.sources[0], shards)
    return [placement[rank] for rank in topo.data_parallel_heads()]


def _open_files(runner: WorkerRunner, step: int | None, lineage: Lineage) -> RunFiles:
    """Opens the run's files, continuing from ``step``. The metrics' come first."""
    files, config = runner.phase_files, runner.phase.config
    main = runner.phase.name == "main"
    metrics = MetricsWriter(
        files,
        tensorboard=config.tensorboard,
        wandb=config.wandb,
        run_name=runner.plan.trial if main else f"{runner.plan.trial}/{runner.phase.name}",
        config=to_plain(runner.plan.options),
        attempt=runner.attempt.number,
        resume_step=step,
        former=[n for n in lineage.limits if n != runner.attempt.number],
    )
    own = metrics.own
    return RunFiles(
        metrics, EventLog(own.events), JsonlAppender(own.ledger), JsonlAppender(own.samples)
    )
