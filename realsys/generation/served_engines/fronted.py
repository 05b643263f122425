"""Base of SGLang and vLLM as child processes: request ids, pauses, versions, weight updates.

A subclass defines how its server is started and called. Both servers load Hugging Face folders with
their own
loaders. Weights from trainers are fetched into memory here while they decode, and presented as a folder in
memory (memory_folder.py); they pause only while they copy from it.
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial

import torch

from realsys.api.errors import ConfigError, DataError, RealsysError, WorkerLost
from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.http_session import HttpSession
from realsys.generation.http.served_engine import Counters, EngineAnswer, Fetch, full_answer
from realsys.generation.served_engines.child import START_TIMEOUT_S, ChildServer
from realsys.generation.served_engines.memory_folder import (
    MemoryFolder,
    TensorExtent,
    check_weights,
    place_for,
    readable_by,
)
from realsys.generation.served_engines.redrawn_answer import RedrawnAnswer
from realsys.generation.served_engines.request_limits import (
    refuse_grammar,
    refuse_kept,
    within_room,
)
from realsys.generation.served_engines.textless_of_folder import textless_of_folder
from realsys.models.hf_directory import check_hf_directory, weight_files, weight_shapes
from realsys.runtime.progress import tick
from realsys.runtime.transfer_time import transfer_time_s
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    PauseMode,
    ServerInfo,
    WeightSource,
    WeightsTaken,
)

logger = logging.getLogger(__name__)

# Callers have deadlines of their own and disconnect: this only prevents endless waits.
REQUEST_S = 24 * 3600.0
CONTROL_S = 60.0
UPDATE_S = 1800.0  # to read a folder of usual size
TAKE_S = 300.0  # to copy from memory, likewise
SHUTDOWN_S = 5.0
IDLE_S = 1.0  # of connections to a child: uvicorn closes them after 5 s, and one just closed appears open
_TICK_S = 5.0
_ENDED_S = 0.25
_RESUMES = 2  # a lost call may be repeated
_POLL_S = 2.0  # interval of progress checks of a child with requests
_OUR_ARGS = ("python", "env", "start_timeout_s", "kv_on_update")


class FrontedEngine(abc.ABC):
    """A ``ServedEngine`` over a child server. For its methods see ``ServedEngine``.

    Args:
        config: its ``backend_args`` are options of the server's command line, and of ours: ``python``
            (interpreter of the environment that it is installed in), ``env`` (variables),
            ``start_timeout_s``, ``kv_on_update`` (recompute | keep).
        fetch: gets the weights of a ``WeightSource`` from trainers.
    """

    kind = ""
    length_option = ""  # command-line option: tokens of prompt and answer together
    positions_kept_back = 0  # positions of the model that no request can use
    _caches = ""  # new requests share prefixes with those of the same name only
    _num_kept = 0  # times that caches were kept at new weights

    def __init__(self, config: GenerationServer, fetch: Fetch) -> None:
        self.counters = Counters()
        self._model_path, self._version = config.model_path, 0
        self._ours = {k: v for k, v in config.backend_args.items() if k in _OUR_ARGS}
        self._theirs = {k: v for k, v in config.backend_args.items() if k not in _OUR_ARGS}
        self._max_positions = self._theirs.get(self.length_option) or (
            check_hf_directory(config.model_path, need_tokenizer=False).max_positions
        )
        self._open: dict[str, int] = {}  # rid → tokens of its prompt and its answer so far
        self._pieces: dict[str, str] = {}  # rid → that of the child's request for it
        self._ending: set[str] = set()  # rids that are to end
        self._textless: frozenset[int] = frozenset()
        self._paused: PauseMode | None = None
        self._stands = False  # paused, or taking weights
        self._child: ChildServer
        self._http: HttpSession  # for answers, which last: any number at a time
        self._control: HttpSession  # for all else
        self._watching: asyncio.Task[None] | None = None
        self._fetch, self._place = fetch, TensorExtent.MEMORY
        self._can_read = True  # weights stored in ``_place``
        self._broken: WorkerLost | None = None
        # One at a time on one core, because the child decodes meanwhile.
        self._staging = ThreadPoolExecutor(
            1, thread_name_prefix="weights", initializer=torch.set_num_threads, initargs=(1,)
        )

    # ---- of each server ---------------------------------------------------------------------

    @abc.abstractmethod
    def _answers(
        self, request: GenerateRequest, *, stream: bool, barred: Collection[int]
    ) -> AsyncIterator[EngineAnswer]:
        """Yields answers directly from the child, as ``generate``; without ids that are ``barred``."""

    @abc.abstractmethod
    async def _abort(self, rid: str, *, every: bool) -> None: ...

    @abc.abstractmethod
    async def _pause(self, mode: PauseMode) -> None: ...

    @abc.abstractmethod
    async def _resume(self) -> None: ...

    @abc.abstractmethod
    async def _load(self, path: str, version: int, *, keep_caches: bool, timeout_s: float) -> None:
        """Loads the folder while paused, and names its weights ``version``."""

    @abc.abstractmethod
    async def _name_version(self, version: int) -> None: ...

    @abc.abstractmethod
    async def flush(self) -> None: ...

    @abc.abstractmethod
    async def _healthy(self) -> bool: ...

    @abc.abstractmethod
    async def _made_progress(self) -> bool:
        """True if the child made progress since the last call; called while it has requests."""

    # ---- ServedEngine -----------------------------------------------------------------------

    async def start(self) -> None:
        timeout_s = float(self._ours.get("start_timeout_s", START_TIMEOUT_S))
        reading = asyncio.to_thread(textless_of_folder, self._model_path)
        starting = self._child.start(self._healthy, timeout_s=timeout_s)
        self._textless, _ = await asyncio.gather(reading, starting)
        await self._name_version(self._version)
        await asyncio.to_thread(self._find_place)
        self._watching = asyncio.create_task(self._watch(), name=f"progress of {self.kind}")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._staging.shutdown(wait=False, cancel_futures=True)
        with suppress(RealsysError, TimeoutError):
            await asyncio.wait_for(self._abort("", every=True), SHUTDOWN_S)
        await self._http.close()
        await self._control.close()
        await self._child.close()

    async def ended(self) -> None:
        while True:
            self._check()
            await asyncio.sleep(_ENDED_S)

    async def generate(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncIterator[EngineAnswer]:
        if self._broken is not None:
            raise self._broken
        if request.rid in self._open:
            raise DataError(
                f"rid {request.rid!r} is in use", where="/generate", fix="use another rid"
            )
        if self._max_positions:
            most = self._max_positions - self.positions_kept_back
            left = most - len(request.input_ids)
            if left < 1:
                yield full_answer(request, most)
                return
            request = within_room(request, left)
        refuse_kept(request, engine=self.kind)
        refuse_grammar(request, engine=self.kind)
        self._open[request.rid] = len(request.input_ids)
        self._pieces[request.rid] = request.rid
        finished = False
        try:
            async with aclosing(self._with_text(request, stream=stream)) as answers:
                async for answer in answers:
                    if request.sampling.return_kept:
                        answer.kept = [b""] * len(answer.output_ids)
                    finished = answer.finish is not None
                    self._open[request.rid] = answer.prompt_tokens + len(answer.output_ids)
                    self.counters.progress += 1
                    if finished:
                        self.counters.count(answer)
                    yield answer
        finally:
            if not finished:
                with suppress(RealsysError):
                    await self._abort(self._pieces[request.rid], every=False)
            del self._open[request.rid], self._pieces[request.rid]
            self._ending.discard(request.rid)

    async def _with_text(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncGenerator[EngineAnswer]:
        """Yields answers as ``generate``, without ids that stand for no text."""
        redrawn = RedrawnAnswer(request, self._textless)
        answer = EngineAnswer(rid=request.rid, prompt_tokens=len(request.input_ids))
        while redrawn.goes_on:
            if request.rid in self._ending:  # between two pieces
                answer.finish = Finish.ABORT
                yield answer
                return
            piece = redrawn.next_piece()
            self._pieces[request.rid] = piece.request.rid
            # Once cut, it may be again: what comes behind a cut is computed for nothing.
            grows = stream or redrawn.num_pieces > 1
            answers = self._answers(piece.request, stream=grows, barred=piece.barred)
            async with aclosing(answers) as parts:  # type: ignore[type-var]
                async for part in parts:
                    answer = redrawn.extended(part)
                    if redrawn.num_pieces > 1 and request.rid in self._ending:
                        break  # aborted before the child knew of this piece
                    if answer.finish is not None or stream:
                        yield answer
                    if redrawn.is_cut:
                        break
            was_left = request.rid in self._ending and answer.finish is None
            redrawn.goes_on |= was_left  # to the end above
            if grows and (redrawn.is_cut or was_left):
                await self._abort(piece.request.rid, every=False)

    async def _watch(self) -> None:
        """Advances ``progress`` while the child works: answers arrive whole, and the first may take
        long.
        """
        while True:
            await asyncio.sleep(_POLL_S)
            if self._open and not self._stands:
                with suppress(RealsysError):
                    self.counters.progress += await self._made_progress()

    async def abort(self, rid: str, *, every: bool = False) -> None:
        if every or rid in self._open:
            self._ending |= {*self._open} if every else {rid}
            await self._abort(self._pieces.get(rid, rid), every=every)

    async def pause(self, mode: PauseMode) -> None:
        self._stands = True
        try:
            await self._pause(mode)
        except BaseException:  # the child may have received the call nevertheless
            with suppress(RealsysError):
                await asyncio.shield(self._resume_or_abandon())
            self._stands = self._paused is not None
            raise
        self._paused = mode

    async def resume(self) -> None:
        self._check()  # a child with partial weights stays paused
        await self._resume()
        self._paused, self._stands = None, False

    async def update_weights(self, source: WeightSource) -> WeightsTaken:
        self._check()
        began_s = time.perf_counter()
        if source.path:
            # An unreadable folder, or one of another model, ends the servers.
            num_bytes = await asyncio.to_thread(check_fits, source.path, self._model_path)
            paused_s = await self._switch(
                source.path, source.version, num_bytes, at_least_s=UPDATE_S
            )
        else:
            staging = asyncio.get_running_loop().run_in_executor(self._staging, self._stage, source)
            folder, num_bytes = await staging
            try:
                paused_s = await self._switch(
                    folder.path, source.version, folder.num_bytes, at_least_s=TAKE_S
                )
            finally:
                await asyncio.to_thread(folder.close)
        return self.counters.count_update(source.version, began_s, paused_s, num_bytes)

    def _stage(self, source: WeightSource) -> tuple[MemoryFolder, int]:
        """Fetches a version, verifies it, and puts it where the child can read it."""
        if not self._can_read:
            raise ConfigError(
                f"{self.kind} can't read the weights that this worker fetched: it runs as "
                "another user, or in another container",
                where="/update_weights_from_stream",
                fix="use schedule.weights_through=disk",
            )
        fetched = self._fetch(source)
        where = ", ".join(part.endpoint for part in source.parts)
        check_weights(fetched.weights, self._model_path, where=where)
        return MemoryFolder(fetched.weights, place=self._place), fetched.num_bytes

    async def _switch(self, path: str, version: int, num_bytes: int, *, at_least_s: float) -> float:
        """Pauses the child while it loads the weights in ``path``; returns the pause in seconds.

        If it fails midway its weights are undefined: then it generates no more, and ``ended`` raises.
        """
        keep = self._ours.get("kv_on_update") == "keep"
        mode = self._paused or (PauseMode.IN_PLACE if keep else PauseMode.RETRACT)
        timeout_s = transfer_time_s(num_bytes, at_least_s=at_least_s)
        ticking = asyncio.create_task(_tick_while_loading(), name="reading weights")
        paused_from_s, loading = time.perf_counter(), False
        self._stands = True
        if mode is PauseMode.IN_PLACE:
            # Kept are the caches of requests that are there. New ones, from here on, share no prefix with
            # them: it is of older weights. A name for each try, since one may fail.
            self._num_kept += 1
            self._caches = f"{version}.{self._num_kept}"
        try:
            if self._paused is None:
                await self._pause(mode)
            loading = True
            await self._load(
                path, version, keep_caches=mode is PauseMode.IN_PLACE, timeout_s=timeout_s
            )
            self._version, loading = version, False
        except BaseException as error:
            if loading:
                why = error.what if isinstance(error, RealsysError) else repr(error)
                self._break(f"failed while it took version {version} of the weights: {why}")
            raise
        finally:
            ticking.cancel()
            # Also after a failed pause: the child may have received it.
            if self._paused is None and self._broken is None:
                await asyncio.shield(self._resume_or_abandon())
                self._stands = False
        return time.perf_counter() - paused_from_s

    async def _resume_or_abandon(self) -> None:
        """Resumes the child. If it can't be reached it is abandoned, since it may stay paused for ever."""
        for tries_left in reversed(range(_RESUMES)):
            try:
                await self._resume()
                return
            except RealsysError as error:
                if not tries_left:
                    self._break(f"is paused and can't be resumed: {error.what}")
                    raise

    def _break(self, why: str) -> None:
        self._broken = WorkerLost(
            f"{self.kind} {why}",
            where=self._model_path,
            fix="the supervisor starts it again, and it gets the newest weights; its log may say why",
        )

    def _check(self) -> None:
        """Raises WorkerLost if the child has ended, or must."""
        if self._broken is not None:
            raise self._broken
        self._child.check()

    def _find_place(self) -> None:
        place = place_for(partial(readable_by, self._python()))
        self._can_read = place is not None
        self._place = place or TensorExtent.MEMORY
        if place is not TensorExtent.MEMORY:
            logger.warning(
                "%s can't open memory of its front: weights from trainers are put on %s",
                self.kind,
                "the disk of this node" if place else "nothing, use schedule.weights_through=disk",
            )

    async def set_version(self, version: int) -> None:
        await self._name_version(version)
        self._version = version

    async def info(self) -> ServerInfo:
        self._check()
        return ServerInfo(
            engine=self.kind,
            model_path=self._model_path,
            weight_version=self._version,
            num_running=len(self._open),
            num_tokens=sum(self._open.values()),
            max_running=self._max_running,
            paused=self._paused is not None,
            updating=self._stands and self._paused is None,
        )

    @property
    def _max_running(self) -> int:
        return 0  # the server's own choice

    def _python(self) -> str:
        import sys

        return str(self._ours.get("python") or sys.executable)

    def _env(self) -> dict[str, str]:
        env = self._ours.get("env") or {}
        return {str(name): str(value) for name, value in env.items()}


def check_fits(path: str, model_path: str) -> int:
    """Checks that the folder is complete and of the server's model; returns the weights' bytes.

    Raises:
        CheckpointError: a file is missing or torn. DataError: a weight has another shape.
    """
    check_hf_directory(path, need_tokenizer=False)
    found, expected = weight_shapes(path), weight_shapes(model_path)
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            raise DataError(
                f"{name} has shape {found[name]}, the model's is {expected[name]}",
                where=path,
                fix=f"give weights of the model in {model_path}",
            )
    if not found.keys() & expected.keys():
        raise DataError("the folder has no weight of the model", where=path, fix="give its folder")
    return sum(file.stat().st_size for file in set(weight_files(path).values()))


def engine_seed(base_seed: int, name: str, start: str) -> int:
    """Computes the seed of a child's own random numbers, of 31 bits: one for each start of each server.

    With one for all, servers whose histories are alike give one answer to one question, and a group of
    answers from several servers has repetitions.
    """
    text = f"{base_seed}:{name}:{start}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


async def _tick_while_loading() -> None:
    """Ticks while the child loads weights, which has a deadline of its own."""
    while True:
        tick()
        await asyncio.sleep(_TICK_S)
