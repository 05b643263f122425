"""What SGLang and vLLM as children have in common: rids, pauses, versions, and one change of weights.

A subclass says how its server is started and spoken to. Weights come from folders only: both read
Hugging Face directories themselves.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from msgspec import structs

from realsys.api.errors import ConfigError, DataError, RealsysError
from realsys.api.progress import tick
from realsys.models.hf_directory import check_hf_directory, weight_files, weight_shapes
from realsys.serving.api import (
    GenerateRequest,
    PauseMode,
    ServerInfo,
    WeightSource,
    WeightsTaken,
)
from realsys.serving.child import START_TIMEOUT_S, ChildServer
from realsys.serving.engines import Answer, Counters, full_answer
from realsys.serving.http_session import HttpSession

# Our own callers have deadlines of their own, and hang up: this only keeps a wait from being endless.
REQUEST_S = 24 * 3600.0
CONTROL_S = 60.0
UPDATE_S = 1800.0
GOODBYE_S = 5.0
IDLE_S = (
    1.0  # of connections to a child: uvicorn closes them after 5 s, and one just closed looks open
)
_TICK_S = 5.0
_LOOK_S = 2.0  # between two questions whether a child that has requests gets on
_OUR_ARGS = ("python", "env", "start_timeout_s", "kv_on_update")


class FrontedEngine(abc.ABC):
    """A ``ServedEngine`` over a child server. Its methods: see ``ServedEngine``.

    Args:
        backend_args: options of the server's command line, and of ours: ``python`` (interpreter of the
            environment that it is installed in), ``env`` (variables), ``start_timeout_s``,
            ``kv_on_update`` (recompute | keep).
    """

    kind = ""
    length_option = ""  # of its command line: tokens of prompt and answer together
    positions_kept_back = 0  # of the model's, that it gives to no request

    def __init__(self, *, model_path: str, backend_args: Mapping[str, Any], version: int) -> None:
        self.counters = Counters()
        self._model_path, self._version = model_path, version
        self._ours = {k: v for k, v in backend_args.items() if k in _OUR_ARGS}
        self._theirs = {k: v for k, v in backend_args.items() if k not in _OUR_ARGS}
        self._max_positions = self._theirs.get(self.length_option) or (
            check_hf_directory(model_path, need_tokenizer=False).max_positions
        )
        self._open: dict[str, int] = {}  # rid → tokens of its prompt and its answer so far
        self._paused: PauseMode | None = None
        self._stands = False  # paused, or taking weights
        self._child: ChildServer
        self._http: HttpSession  # for answers, which last: any number at a time
        self._control: HttpSession  # for all else
        self._watching: asyncio.Task[None] | None = None

    # ---- of each server ---------------------------------------------------------------------

    @abc.abstractmethod
    def _answers(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[Answer]:
        """As ``generate``, straight from the child."""

    @abc.abstractmethod
    async def _abort(self, rid: str, *, every: bool) -> None: ...

    @abc.abstractmethod
    async def _pause(self, mode: PauseMode) -> None: ...

    @abc.abstractmethod
    async def _resume(self) -> None: ...

    @abc.abstractmethod
    async def _load(self, path: str, version: int, *, keep_caches: bool) -> None:
        """While paused: reads the folder, and calls its weights ``version``."""

    @abc.abstractmethod
    async def _name_version(self, version: int) -> None: ...

    @abc.abstractmethod
    async def flush(self) -> None: ...

    @abc.abstractmethod
    async def _healthy(self) -> bool: ...

    @abc.abstractmethod
    async def _gets_on(self) -> bool:
        """Whether it did anything since the last call; asked while it has requests."""

    # ---- ServedEngine -----------------------------------------------------------------------

    async def start(self) -> None:
        timeout_s = float(self._ours.get("start_timeout_s", START_TIMEOUT_S))
        await self._child.start(self._healthy, timeout_s=timeout_s)
        await self._name_version(self._version)
        self._watching = asyncio.create_task(self._watch(), name=f"progress of {self.kind}")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        with suppress(RealsysError, TimeoutError):
            await asyncio.wait_for(self._abort("", every=True), GOODBYE_S)
        await self._http.close()
        await self._control.close()
        await self._child.close()

    async def ended(self) -> None:
        await self._child.ended()

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[Answer]:
        if request.rid in self._open:
            raise DataError(
                f"rid {request.rid!r} is on its way", where="/generate", fix="use another rid"
            )
        if self._max_positions:
            left = self._max_positions - self.positions_kept_back - len(request.input_ids)
            if left < 1:
                yield full_answer(request)
                return
            request = within_room(request, left)
        self._open[request.rid] = len(request.input_ids)
        finished = False
        try:
            async with aclosing(self._answers(request, stream=stream)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    finished = answer.finish is not None
                    self._open[request.rid] = answer.prompt_tokens + len(answer.output_ids)
                    self.counters.progress += 1
                    if finished:
                        self.counters.count(answer)
                    yield answer
        finally:
            if not finished:
                with suppress(RealsysError):
                    await self._abort(request.rid, every=False)
            del self._open[request.rid]

    async def _watch(self) -> None:
        """Moves ``progress`` while the child works: answers come whole, and the first may take long."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._open and not self._stands:
                with suppress(RealsysError):
                    self.counters.progress += await self._gets_on()

    async def abort(self, rid: str, *, every: bool = False) -> None:
        if every or rid in self._open:
            await self._abort(rid, every=every)

    async def pause(self, mode: PauseMode) -> None:
        self._stands = True
        try:
            await self._pause(mode)
        except BaseException:  # it may have heard us all the same
            with suppress(RealsysError):
                await asyncio.shield(self._resume())
            self._stands = self._paused is not None
            raise
        self._paused = mode

    async def resume(self) -> None:
        await self._resume()
        self._paused, self._stands = None, False

    async def update_weights(self, source: WeightSource) -> WeightsTaken:
        if not source.path:
            raise ConfigError(
                f"{self.kind} takes weights from a folder only",
                where="/update_weights_from_stream",
                fix="give path, or use backend_type=embedded",
            )
        # A folder that they can't read, or of another model, ends them.
        num_bytes = await asyncio.to_thread(check_fits, source.path, self._model_path)
        keep = self._ours.get("kv_on_update") == "keep"
        mode = self._paused or (PauseMode.IN_PLACE if keep else PauseMode.RETRACT)
        began_s = time.perf_counter()
        ticking = asyncio.create_task(_tick_along(), name="reading weights")
        self._stands = True
        try:
            if self._paused is None:
                await self._pause(mode)
            await self._load(source.path, source.version, keep_caches=mode is PauseMode.IN_PLACE)
            self._version = source.version
        finally:
            ticking.cancel()
            if self._paused is None:  # also after a pause that failed: it may have heard us
                await asyncio.shield(self._resume())
                self._stands = False
        seconds = time.perf_counter() - began_s
        taken = WeightsTaken(
            version=source.version, seconds=seconds, paused_s=seconds, num_bytes=num_bytes
        )
        self.counters.count_update(taken)
        return taken

    async def set_version(self, version: int) -> None:
        await self._name_version(version)
        self._version = version

    async def info(self) -> ServerInfo:
        self._child.check()
        return ServerInfo(
            engine=self.kind,
            model_path=self._model_path,
            weight_version=self._version,
            num_running=len(self._open),
            num_tokens=sum(self._open.values()),
            max_running=self._max_running,
            paused=self._paused is not None,
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
    """Checks that the folder is whole and of the model that the server was started with; bytes of weights.

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
        raise DataError("no weight of the model is there", where=path, fix="give its folder")
    return sum(file.stat().st_size for file in set(weight_files(path).values()))


def within_room(request: GenerateRequest, left: int) -> GenerateRequest:
    """``request`` for at most ``left`` tokens: children differ in what they do with more."""
    sampling = request.sampling
    if sampling.max_new_tokens <= left:
        return request
    least = min(sampling.min_new_tokens, left)
    clipped = structs.replace(sampling, max_new_tokens=left, min_new_tokens=least)
    return structs.replace(request, sampling=clipped)


async def _tick_along() -> None:
    """While the child reads weights, which has a deadline: no tokens come, and nothing stands still."""
    while True:
        tick()
        await asyncio.sleep(_TICK_S)
