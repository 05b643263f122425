"""Builds a generation server: engine, HTTPS front, registration; serves until the run ends."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realsys.api.errors import ConfigError, did_you_mean
from realsys.api.worker_configs import GenerationServer
from realsys.data.transfer.tensor_client import TensorClient
from realsys.devices.cuda_settings import apply, settings_for
from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.generation.http.secret import bearer_key
from realsys.generation.http.served_engine import Fetch, FetchedWeights, ServedEngine
from realsys.generation.served_engines.embedded import EmbeddedEngine
from realsys.generation.served_engines.sglang import SGLangEngine
from realsys.generation.served_engines.vllm import VLLMEngine
from realsys.generation.server.http_app import generation_app
from realsys.runtime import worker_exit_codes
from realsys.runtime.child_processes.child_guard import guarded
from realsys.runtime.first_error import first_of
from realsys.runtime.lifecycle import WorkerEvent
from realsys.runtime.progress import tick
from realsys.runtime.transfer_time import transfer_time_s
from realsys.runtime.worker_commands import Verb
from realsys.transport.generation_messages import WeightSource
from realsys.transport.http_listener import HttpListener
from realsys.trial.records import is_there, process_start
from realsys.weights.sync.host_share import HostShare
from realsys.weights.sync.receiver import WeightReceiver
from realsys.worker.device import compute_device
from realsys.worker.runner import WorkerRunner, channel_identity

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0
_POLL_S = 0.5
_SURE_S = 10.0  # interval of the check for the end of the phase: a file that all servers read
TICKS_WITHIN_S = 300.0  # one step of decoding, all caches computed anew, on a slow machine


def run(runner: WorkerRunner) -> int:
    """Runs the server until it ends; returns its exit code."""
    identity = channel_identity(runner)
    keypairs = identity["keypairs"]
    receiver = WeightReceiver(
        lambda endpoints: TensorClient(endpoints, **identity),
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
            start=f"{_attempt(runner)} {os.getpid()} {process_start(os.getpid())}",
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
    listener = HttpListener(generation_app(engine, key=key), host=runner.host, ports=runner.ports)
    try:
        await engine.start()
        await listener.start()
        await asyncio.to_thread(runner.register, control=listener.url)
        runner.ticks_within_s = TICKS_WITHIN_S
        runner.move(WorkerEvent.STARTED, mfc="serving")
        await first_of(
            {
                "commands": over.wait(),
                "end of the phase": _phase_done(runner),
                "engine": engine.ended(),
                "progress": _tick_while_well(engine),
            }
        )
        runner.move(WorkerEvent.FINISHED_CALL)
    finally:
        await engine.close()  # answers end with their tokens so far, and are sent
        await listener.stop()


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
        await asyncio.sleep(_POLL_S)


async def _tick_while_well(engine: ServedEngine) -> None:
    """Ticks while the engine is idle, and whenever it makes progress with its requests."""
    progress = -1
    while True:
        info = await engine.info()
        idle = info.paused or not info.num_running + info.num_waiting
        if idle or engine.counters.progress != progress:
            progress = engine.counters.progress
            tick()
        await asyncio.sleep(_POLL_S)


# ---- Makes the engine that a ``GenerationServer`` configures: embedded, SGLang or vLLM.


BACKENDS = ("embedded", "sglang", "vllm")


def make_engine(
    config: GenerationServer,
    *,
    name: str,
    log: Path,
    scratch: Path,
    fetch: Fetch,
    gpus: float = 0.0,
    deterministic: bool | None = None,
    start: str = "",
) -> ServedEngine:
    """Makes the engine, not started; an embedded one has its first weights.

    Args:
        name: name of the worker, for errors.
        log: log file of a child process.
        scratch: an existing private folder.
        fetch: fetches new weights from trainers.
        gpus: GPUs of the worker's task; with one, an embedded engine uses it unless its settings differ.
        deterministic: an embedded engine gives equal answers to equal requests; None: on the CPU only.
        start: differs each time that the server ``name`` is started: of the own random numbers of SGLang
            and vLLM.
    Raises:
        ConfigError: an unknown backend or setting. CheckpointError: ``model_path`` is not whole.
    """
    child: dict[str, Any] = {"name": name, "log": log, "guard": guarded, "start": start}
    match config.backend_type:
        case "embedded":
            return _embedded(config, fetch, name=name, gpus=gpus, deterministic=deterministic)
        case "sglang":
            return SGLangEngine(config, fetch, scratch=scratch, **child)
        case "vllm":
            return VLLMEngine(config, fetch, **child)
    raise ConfigError(
        f"no generation backend {config.backend_type!r}",
        where=f"{name}, backend_type",
        fix=did_you_mean(config.backend_type, BACKENDS),
    )


def _embedded(
    config: GenerationServer, fetch: Fetch, *, name: str, gpus: float, deterministic: bool | None
) -> EmbeddedEngine:
    import torch

    from realsys.models.hf import end_token_ids, load_causal_lm, load_tokenizer

    if config.tp_size != 1:
        raise ConfigError(
            f"tp_size is {config.tp_size}", where="embedded generation server", fix="use 1"
        )
    args = dict(config.backend_args)
    if "device" not in args:
        sees_gpu = torch.cuda.is_available()
        args["device"] = compute_device(gpus, sees_gpu=sees_gpu, worker=name, environ=os.environ)
    if str(args["device"]).startswith("cuda"):
        args.setdefault("dtype", "bfloat16")  # float32 is a tenth as fast there
    settings = EmbeddedSettings.from_args(args)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    # As a model worker does: the same kernels, the same bits.
    apply(settings_for(settings.device, deterministic=deterministic, gpus=gpus))
    module = load_causal_lm(config.model_path, dtype=settings.dtype, device=settings.device)
    tokenizer = load_tokenizer(config.model_path)
    return EmbeddedEngine(
        module,
        eos_token_ids=end_token_ids(tokenizer, getattr(module, "generation_config", None)),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        model_path=config.model_path,
        base_seed=config.base_seed,
        settings=settings,
        fetch=fetch,
    )
