"""Builds a generation server: engine, HTTPS front, registration; serves until the run ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from realsys.data.transfer.tensor_client import TensorClient
from realsys.generation.http.secret import bearer_key
from realsys.generation.http.served_engine import FetchedWeights, ServedEngine
from realsys.generation.server.choose_engine import make_engine
from realsys.generation.server.http_app import generation_app
from realsys.generation.server.listener import HttpsListener
from realsys.runtime import worker_exit_codes
from realsys.runtime.lifecycle import WorkerEvent
from realsys.runtime.progress import tick
from realsys.runtime.transfer_time import transfer_time_s
from realsys.runtime.worker_commands import Verb
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import WeightSource
from realsys.trial.records import is_there
from realsys.weights.sync.host_share import HostShare
from realsys.weights.sync.receiver import WeightReceiver
from realsys.worker.runner import WorkerRunner

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0
_LOOK_S = 0.5
_SURE_S = 10.0  # for the end of the phase: a file that all servers look at
TICKS_WITHIN_S = 300.0  # one step of decoding, all caches computed anew, on a slow machine


def run(runner: WorkerRunner) -> int:
    """Runs the server until it ends; returns its exit code."""
    keypairs = TrialKeypairs.load(runner.attempt_files.curve_keys)
    receiver = WeightReceiver(
        lambda endpoints: TensorClient(
            endpoints,
            trial=runner.plan.trial,
            attempt=runner.attempt.number,
            token=runner.attempt.token,
            keypairs=keypairs,
        ),
        share=lambda fetch: HostShare(keypairs, attempt=_attempt(runner), fetch=fetch),
    )
    try:
        engine = make_engine(
            runner.config,
            name=runner.name,
            log=runner.attempt_files.log(f"{runner.name}-{runner.config.backend_type}"),
            scratch=runner.attempt_files.curve_keys.parent,
            fetch=fetch_with(receiver),
            gpus=_gpus(runner),
            deterministic=runner.phase.config.deterministic,
        )
        asyncio.run(_serve(runner, engine, bearer_key(keypairs)))
    finally:
        receiver.close()
    return worker_exit_codes.STOPPED if runner.controls.is_interrupted else worker_exit_codes.DONE


def _attempt(runner: WorkerRunner) -> str:
    """Identifier that is unique among attempts of all trials."""
    return f"{runner.plan.trial} {runner.attempt.number} {runner.attempt.token}"


def _gpus(runner: WorkerRunner) -> float:
    group = runner.phase.scheduling.generation_server
    return group.scheduling.gpu if group is not None else 0.0


def fetch_with(receiver: WeightReceiver) -> Callable[[WeightSource], FetchedWeights]:
    """Makes the function with which an engine fetches new weights."""

    def fetch(source: WeightSource) -> FetchedWeights:
        before = receiver.num_bytes
        timeout_s = transfer_time_s(source.num_bytes, at_least_s=FETCH_TIMEOUT_S)
        weights = receiver.fetch(source, timeout_s=timeout_s)
        came = receiver.num_bytes - before
        read = sum(w.numel() * w.element_size() for w in weights.values()) if source.path else 0
        return FetchedWeights(weights, came + read)

    return fetch


async def _serve(runner: WorkerRunner, engine: ServedEngine, key: str) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    runner.controls.supported = frozenset({Verb.CONFIGURE, Verb.DUMP, Verb.INTERRUPT, Verb.EXIT})

    def leave() -> None:
        loop.call_soon_threadsafe(over.set)

    runner.controls.leave = leave
    listener = HttpsListener(generation_app(engine, key=key), host=runner.host, ports=runner.ports)
    try:
        await engine.start()
        await listener.start()
        await asyncio.to_thread(runner.register, control=listener.url)
        runner.ticks_within_s = TICKS_WITHIN_S
        runner.move(WorkerEvent.STARTED, mfc="serving")
        await _first_of(
            {
                "commands": over.wait(),
                "end of the phase": _phase_done(runner),
                "engine": engine.ended(),
                "progress": _tick_while_well(engine),
            }
        )
        runner.move(WorkerEvent.FINISHED_CALL)
    finally:
        await engine.close()  # answers end with what they have, and are sent
        await listener.stop()


async def _first_of(waits: dict[str, Coroutine[Any, Any, Any]]) -> None:
    """Waits until one of them ends; raises what it raised."""
    tasks = [asyncio.create_task(wait, name=name) for name, wait in waits.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        logger.info("leaving because=%s", task.get_name())
        task.result()


async def _phase_done(runner: WorkerRunner) -> None:
    """Waits until the master has recorded the phase's end or its key has disappeared.

    Its key disappears in either case: that triggers the look at the record, which is also repeated
    now and then in case the store is unavailable.
    """
    done, next_s = runner.attempt_files.done(runner.phase.name), time.monotonic() + _SURE_S
    while True:
        if runner.is_alone or time.monotonic() >= next_s:
            next_s = time.monotonic() + _SURE_S
            if await asyncio.to_thread(is_there, done):
                return
        await asyncio.sleep(_LOOK_S)


async def _tick_while_well(engine: ServedEngine) -> None:
    """Ticks while the engine is idle, and whenever it makes progress with its requests."""
    progress = -1
    while True:
        info = await engine.info()
        idle = info.paused or not info.num_running + info.num_waiting
        if idle or engine.counters.progress != progress:
            progress = engine.counters.progress
            tick()
        await asyncio.sleep(_LOOK_S)
