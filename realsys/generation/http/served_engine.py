"""Engine interface used by the HTTP application (http_app.py): ``ServedEngine``.

Implemented by embedded.py (the embedded engine in this process), sglang.py and vllm.py (a child
process), and by test doubles. No torch here, no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from realsys.api.errors import InternalError
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    ServerInfo,
    WeightSource,
    WeightsTaken,
)

if TYPE_CHECKING:  # values that are only handed on
    from torch import Tensor


class FetchedWeights(NamedTuple):
    """Weights by Hugging Face name, and the number of bytes read for them."""

    weights: Mapping[str, Tensor]
    num_bytes: int


# Called in a thread of its own. What it gives is only read.
Fetch = Callable[[WeightSource], FetchedWeights]


class EngineAnswer(msgspec.Struct, kw_only=True):
    """A request's output so far: a ``GenerateResult`` that may be unfinished (``finish`` is None)."""

    rid: str
    output_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept: list[bytes] = []
    fault: str = ""  # of its grammar: it can't be completed
    context_length: int = 0  # where the prompt fills it

    def result(self) -> GenerateResult:
        """Returns the finished answer as a value."""
        if self.finish is None:
            raise InternalError(
                f"request {self.rid!r} has not ended", where="http/served_engine.py"
            )
        return GenerateResult(
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            kept=tuple(self.kept),
            context_length=self.context_length,
        )


def full_answer(request: GenerateRequest, context_length: int) -> EngineAnswer:
    """Makes the empty answer to a prompt that fills the context, with finish ``length``.

    Args:
        context_length: most tokens of prompt and answer together.
    """
    return EngineAnswer(
        rid=request.rid,
        finish=Finish.LENGTH,
        prompt_tokens=len(request.input_ids),
        context_length=context_length,
    )


class Counters(msgspec.Struct, kw_only=True):
    """Totals since the start, for ``/metrics``. ``progress`` changes whenever tokens are generated."""

    progress: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    weight_updates: int = 0
    update_s: float = 0.0
    update_paused_s: float = 0.0

    def count(self, answer: EngineAnswer) -> None:
        """Adds a request that has ended."""
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.generated_tokens += len(answer.output_ids)
        self.finished += 1
        self.aborted += answer.finish is Finish.ABORT

    def count_update(
        self, version: int, began_s: float, paused_s: float, num_bytes: int
    ) -> WeightsTaken:
        """Adds a weight update that has just ended; returns the reply to it.

        Args:
            began_s: by ``time.perf_counter``.
        """
        seconds = time.perf_counter() - began_s
        self.weight_updates += 1
        self.update_s += seconds
        self.update_paused_s += paused_s
        return WeightsTaken(
            version=version, seconds=seconds, paused_s=paused_s, num_bytes=num_bytes
        )


class ServedEngine(Protocol):
    """One engine, used from one event loop.

    Invalid requests raise DataError or ConfigError; WorkerLost means that the engine has ended for good.
    """

    counters: Counters

    async def start(self) -> None:
        """Starts the engine; returns when it can generate."""

    def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncIterator[EngineAnswer]:
        """Yields the growing answer, complete so far each time (``stream``), or only the finished one.

        It ends with ``length`` if the context is full: without tokens, if the prompt fills it. Waits while
        paused. Closing the iterator early aborts its request.
        """

    async def abort(self, rid: str, *, every: bool = False) -> None:
        """Ends one request, or all, with their tokens so far. An unknown id is no error."""

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no more tokens are generated."""

    async def resume(self) -> None: ...

    async def update_weights(self, source: WeightSource) -> WeightsTaken:
        """Updates the weights; running requests continue with them. On failure the old ones stay in
        place.
        """

    async def set_version(self, version: int) -> None:
        """Names the present weights ``version``."""

    async def flush(self) -> None:
        """Drops cached prefixes."""

    async def info(self) -> ServerInfo: ...

    async def ended(self) -> None:
        """Never returns; raises the error that ended the engine."""

    async def close(self) -> None:
        """Ends running requests (finish ``abort``) and everything that it started."""
