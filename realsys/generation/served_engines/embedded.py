"""``ServedEngine`` over the embedded engine: the asyncio side of engine_thread.py.

Answers arrive from the engine's thread in one call per step. A reader that is slower than the engine sees
only the newest state of its answer, so nothing accumulates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from realsys.api.errors import ConfigError, DataError, WorkerLost
from realsys.api.model import GenerationHyperparameters
from realsys.generation.embedded_settings import EmbeddedSettings, stages_on_gpu
from realsys.generation.engine.cache_room import room_on_gpu
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationOutput, GenerationRequest
from realsys.generation.engine.row import room_left
from realsys.generation.engine.sampling import row_seed
from realsys.generation.engine.textless_ids import textless_ids
from realsys.generation.http.served_engine import Counters, EngineAnswer, Fetch, full_answer
from realsys.generation.served_engines.engine_thread import EngineThread
from realsys.generation.served_engines.staged_weights import StagedWeights, stage
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    PauseMode,
    ServerInfo,
    WeightSource,
    WeightsTaken,
)

logger = logging.getLogger(__name__)
# Of a step, by whether it is a GPU's: more are hardly quicker, and who runs waits for them.
_READ_TOKENS = {False: 1024, True: 8192}
T = TypeVar("T")


@dataclass
class _OpenRequest:
    """An open request: its newest state, and the waiter to wake for it."""

    prompt_tokens: int
    stream: bool
    answer: EngineAnswer | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EmbeddedEngine:
    """Serves ``module``, whose weights it replaces in place.

    Args:
        eos_token_ids: end an answer, unless its request ignores them.
        model_path: where the first weights come from, for ``info``.
        base_seed: of requests that bring no seed of their own.
        fetch: gets the weights of a ``WeightSource``; called in a thread of its own, one at a time.
            What it gives is only read, and let go of after the switch.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        tokenizer: Any = None,
        model_path: str = "",
        base_seed: int = 1,
        settings: EmbeddedSettings | None = None,
        fetch: Fetch,
    ) -> None:
        self.settings = settings or EmbeddedSettings()
        self.counters = Counters()
        self._module = module.requires_grad_(False).eval()
        self._eos, self._pad, self._tokenizer = tuple(eos_token_ids), pad_token_id, tokenizer
        self._model_path, self._base_seed, self._version = model_path, base_seed, 0
        self._fetch = fetch
        self._wait_there = self.settings.staging == "host"  # new weights, until the switch
        self._open: dict[str, _OpenRequest] = {}
        self._pause_mode: PauseMode | None = None
        self._over: WorkerLost | None = None
        self._thread = EngineThread(
            self._make, on_outputs=self._step_made, on_end=self._thread_ended
        )
        # One at a time on one core, because the engine decodes meanwhile.
        self._staging = ThreadPoolExecutor(
            1, thread_name_prefix="weights", initializer=torch.set_num_threads, initargs=(1,)
        )

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread.start()
        await self._call(lambda engine: None)

    async def close(self) -> None:
        if not self._ended.is_set():
            await self.abort("", every=True)
        await self._loop.run_in_executor(None, self._thread.stop)
        self._staging.shutdown(wait=False, cancel_futures=True)

    async def ended(self) -> None:
        await self._ended.wait()
        if self._over is not None:
            raise self._over

    # ---- requests ---------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncIterator[EngineAnswer]:
        if request.rid in self._open:
            raise DataError(
                f"rid {request.rid!r} is in use", where="/generate", fix="use another rid"
            )
        entry = self._open[request.rid] = _OpenRequest(len(request.input_ids), stream)
        asked = engine_request(request, eos_token_ids=self._eos, base_seed=self._base_seed)
        finished = False
        try:
            if full := await self._call(lambda engine: _submit(engine, asked)):
                finished = True
                yield full_answer(request, full)
            while not finished:
                await entry.changed.wait()
                entry.changed.clear()
                if entry.answer is None:
                    raise self._over or _closed()
                answer = entry.answer
                finished = answer.finish is not None
                if answer.fault:
                    raise DataError(
                        f"the answer can't be held to its grammar: {answer.fault}",
                        where=f"/generate, request {request.rid!r}",
                        fix="send a simpler schema",
                    )
                yield answer
        finally:
            if not finished:
                self._thread.call(lambda engine: engine.abort(request.rid))
            del self._open[request.rid]

    async def abort(self, rid: str, *, every: bool = False) -> None:
        def end(engine: ContinuousEngine) -> None:
            ended = engine.abort_all() if every else [engine.abort(rid)]
            self._step_made([output for output in ended if output is not None])

        await self._call(end)

    async def pause(self, mode: PauseMode) -> None:
        def stand_still(engine: ContinuousEngine) -> None:
            self._thread.paused = True
            if mode is PauseMode.ABORT:
                self._step_made(engine.abort_all())
            elif mode is PauseMode.RETRACT:
                engine.retract_all()

        await self._call(stand_still)
        self._pause_mode = mode

    async def resume(self) -> None:
        await self._call(lambda engine: setattr(self._thread, "paused", False))
        self._pause_mode = None

    async def flush(self) -> None:
        await self._call(lambda engine: engine.flush_prefixes())

    # ---- weights ----------------------------------------------------------------------------

    async def update_weights(self, source: WeightSource) -> WeightsTaken:
        began_s = time.perf_counter()
        staged, num_bytes = await self._loop.run_in_executor(self._staging, self._stage, source)

        def switch(engine: ContinuousEngine) -> float:
            paused_from_s = time.perf_counter()
            staged.switch()
            engine.set_version(source.version, recompute=self._recompute)
            self._version = source.version
            return time.perf_counter() - paused_from_s

        paused_s = await self._call(switch, fatal=True)
        return self.counters.count_update(source.version, began_s, paused_s, num_bytes)

    async def set_version(self, version: int) -> None:
        def rename(engine: ContinuousEngine) -> None:
            engine.set_version(version, recompute=False)
            self._version = version

        await self._call(rename, fatal=True)

    @property
    def _recompute(self) -> bool:
        """True if running requests are prefilled again with new weights."""
        if self._pause_mode is PauseMode.IN_PLACE:
            return False
        return self.settings.kv_on_update == "recompute"

    def _stage(self, source: WeightSource) -> tuple[StagedWeights, int]:
        where = source.path or ", ".join(part.endpoint for part in source.parts)
        fetched = self._fetch(source)
        staged = stage(self._module, fetched.weights, where=where, wait_there=self._wait_there)
        return staged, fetched.num_bytes

    # ---- how it does ------------------------------------------------------------------------

    async def info(self) -> ServerInfo:
        if self._over is not None:
            raise self._over
        load = self._thread.load
        return ServerInfo(
            engine="embedded",
            model_path=self._model_path,
            weight_version=self._version,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_tokens=load.num_tokens,
            max_running=self.settings.max_running,
            paused=self._thread.paused,
        )

    # ---- the engine's thread ----------------------------------------------------------------

    async def _call(self, command: Callable[[ContinuousEngine], T], *, fatal: bool = False) -> T:
        return await asyncio.wrap_future(self._thread.call(command, fatal=fatal))

    def _make(self) -> ContinuousEngine:
        if self.settings.num_threads is not None:
            torch.set_num_threads(self.settings.num_threads)
        module: Any = self._module
        vocabulary = module.get_input_embeddings().weight.shape[0]
        # Its EOS is each request's own stop token: a request may ignore it.
        return ContinuousEngine(
            self._module,
            eos_token_ids=(),
            pad_token_id=self._pad,
            max_running=self.settings.max_running,
            max_tokens=self._max_tokens(),
            tokenizer=self._tokenizer,
            textless=textless_ids(self._tokenizer, vocabulary=vocabulary, ends=self._eos),
            version=self._version,
            quantize=self.settings.quantize,
            prefix_bytes=self.settings.prefix_bytes,
            read_tokens=self.settings.read_tokens or _READ_TOKENS[_on_gpu(self._module)],
        )

    def _max_tokens(self) -> int | None:
        """Configured cache size; else, on a GPU, what fits beside new weights during an update."""
        settings = self.settings
        if not _on_gpu(self._module):
            return settings.max_tokens
        new = sum(p.numel() * p.element_size() for p in self._module.parameters())
        least = settings.max_tokens or settings.least_tokens
        if settings.staging == "auto":
            self._wait_there = not stages_on_gpu(self._room(new), least)
        if settings.max_tokens is not None:
            return settings.max_tokens
        found = self._room(0 if self._wait_there else new)
        logger.info(
            "cache size chosen tokens=%d staging_memory=%s",
            found,
            "host" if self._wait_there else "gpu",
        )
        if found < least:
            second = "" if self._wait_there else " a second copy that comes with an update,"
            raise ConfigError(
                f"the GPU has no room for the cache of {least} tokens beside the weights,{second} and "
                f"prefix_bytes={settings.prefix_bytes}",
                where="generation engine",
                fix="lower max_running or prefix_bytes, "
                + ("" if self._wait_there else "leave staging out, ")
                + "use a larger GPU or server_backend sglang or vllm over several; or set max_tokens, "
                "which is then not checked",
            )
        return found

    def _room(self, new: int) -> int:
        """Number of cache tokens that fit beside ``new`` bytes of weights."""
        settings = self.settings
        kept = new + settings.prefix_bytes
        return room_on_gpu(self._module, num_rows=settings.max_running, kept=kept)

    def _step_made(self, outputs: list[GenerationOutput]) -> None:
        """Copies awaited outputs and wakes the loop once; called in the engine's thread."""
        self.counters.progress += len(outputs)
        news = []
        for output in outputs:
            entry = self._open.get(output.rid)
            if entry is not None and (output.finish or entry.stream):
                news.append((entry, answer_of(output, prompt_tokens=entry.prompt_tokens)))
        if news:
            self._loop.call_soon_threadsafe(self._notify, news)

    def _notify(self, news: Sequence[tuple[_OpenRequest, EngineAnswer]]) -> None:
        for entry, answer in news:
            if answer.finish is not None:
                self.counters.count(answer)
            entry.answer = answer
            entry.changed.set()

    def _thread_ended(self, error: WorkerLost | None) -> None:
        def tell() -> None:
            self._over = error or _closed()
            for entry in self._open.values():
                if entry.answer is None or entry.answer.finish is None:
                    entry.answer = None
                    entry.changed.set()
            self._ended.set()

        self._loop.call_soon_threadsafe(tell)


def _on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).is_cuda


def _submit(engine: ContinuousEngine, request: GenerationRequest) -> int:
    """Submits a request; returns the context length if not a single token fits, else 0."""
    if room_left(len(request.prompt), engine.rooms) == 0:
        return room_left(0, engine.rooms) or 0
    engine.submit(request)
    return 0


def _closed() -> WorkerLost:
    return WorkerLost("the engine was closed", where="generation engine", fix="use another server")


# ---- Conversion between the API's values and the embedded engine's (pure).


def engine_request(
    request: GenerateRequest, *, eos_token_ids: Sequence[int], base_seed: int
) -> GenerationRequest:
    """Converts a request of the API to one of the engine."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    gconfig = GenerationHyperparameters(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        greedy=greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
    )
    seed = sampling.sampling_seed
    return GenerationRequest(
        rid=request.rid,
        prompt=request.input_ids,
        gconfig=gconfig,
        seed=row_seed(base_seed, request.rid, 0, 0) if seed is None else seed,
        position=sampling.position,
        stop_ids=frozenset(
            {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        ),
        stop_texts=sampling.stop,
        return_kept=sampling.return_kept,
        grammar=sampling.grammar,
    )


def answer_of(output: GenerationOutput, *, prompt_tokens: int) -> EngineAnswer:
    """Converts a copy of the engine's output so far."""
    return EngineAnswer(
        rid=output.rid,
        output_ids=list(output.tokens),
        logprobs=list(output.logprobs),
        versions=list(output.versions),
        finish=Finish(output.finish) if output.finish else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=output.cached_tokens,
        kept=list(output.kept),
        fault=output.fault,
    )
