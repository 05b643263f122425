"""A generation server without a model, for tests of whoever uses one.

The real HTTP front, client and errors, over an engine whose tokens are a function of (prompt and answer
so far, seed, index in the answer).

    async with ServerDouble() as server:
        client = server.client()
        result = await client.generate(GenerateRequest(rid="r", input_ids=(1, 2, 3)), timeout_s=5)

In a process of its own: ``python -m tests.serving_double`` prints its URL and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from full_client import FullClient

from realsys.api.errors import ConfigError, DataError, RealsysError, WorkerLost
from realsys.generation.http.served_engine import Counters, EngineAnswer
from realsys.generation.server.http_app import generation_app
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    PauseMode,
    Sampling,
    ServerAddress,
    ServerInfo,
    WeightSource,
    WeightsTaken,
)
from realsys.transport.http_listener import HttpListener

KEY = "key of a test"


def double_token(
    input_ids: Sequence[int], *, seed: int, position: int, vocab_size: int = 100
) -> int:
    """The token after ``input_ids`` (prompt and the answer so far), at this index in the answer.

    An answer made in chunks is the one made at once: prompt and answer are not told apart.
    """
    text = f"{seed} {position} {','.join(map(str, input_ids))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "little") % (vocab_size - 2)  # 0, 1: padding and end


def double_logprob(token: int, version: int) -> float:
    """Its log-prob: says which token and which weights, exact in binary."""
    return -(token + 1) / 128 - version


def double_answer(
    input_ids: Sequence[int], sampling: Sampling, *, version: int = 0, vocab_size: int = 100
) -> EngineAnswer:
    """What the double answers if nobody disturbs it."""
    tokens = list(input_ids)
    answer = EngineAnswer(rid="", prompt_tokens=len(tokens))
    while answer.finish is None:
        _add_token(answer, tokens, sampling, version=version, vocab_size=vocab_size)
    return answer


def _add_token(
    answer: EngineAnswer, tokens: list[int], sampling: Sampling, *, version: int, vocab_size: int
) -> None:
    position = sampling.position + len(answer.output_ids)
    seed = sampling.sampling_seed or 0
    token = double_token(tokens, seed=seed, position=position, vocab_size=vocab_size)
    tokens.append(token)
    answer.output_ids.append(token)
    answer.logprobs.append(double_logprob(token, version))
    answer.versions.append(version)
    made = len(answer.output_ids)
    if token in sampling.stop_token_ids and made > sampling.min_new_tokens:
        answer.finish = Finish.STOP
    elif made >= sampling.max_new_tokens:
        answer.finish = Finish.LENGTH


@dataclass
class DoubleEngine:
    """A ``ServedEngine``. Attributes may be changed at any time.

    Attributes:
        version: of the weights.
        token_s: time a token takes.
        update_s: time that a change of weights takes.
        fail_next: raised by that many next requests (``failure``).
        refuse_weights: what a change of weights raises.
        hang: requests get no token while it is set.
        seen: requests in the order they came.
    """

    version: int = 0
    vocab_size: int = 100
    token_s: float = 0.0
    update_s: float = 0.0
    fail_next: int = 0
    failure: RealsysError = field(
        default_factory=lambda: DataError("this one fails", where="the double", fix="go on")
    )
    refuse_weights: RealsysError | None = None
    hang: bool = False
    max_running: int = 64
    paused: bool = False
    dead: str = ""
    seen: list[GenerateRequest] = field(default_factory=list)
    sources: list[WeightSource] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    running: dict[str, EngineAnswer] = field(default_factory=dict)

    async def start(self) -> None:
        self._died = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncIterator[EngineAnswer]:
        self.seen.append(request)
        self._check_alive()
        if self.fail_next > 0:
            self.fail_next -= 1
            raise self.failure
        if request.rid in self.running:
            raise DataError(f"rid {request.rid!r} is in use", where="the double", fix="use another")
        answer = EngineAnswer(rid=request.rid, prompt_tokens=len(request.input_ids))
        tokens = list(request.input_ids)
        self.running[request.rid] = answer
        try:
            while answer.finish is None:
                await asyncio.sleep(self.token_s)
                while (self.paused or self.hang) and answer.finish is None:
                    await asyncio.sleep(0.005)
                    self._check_alive()
                self._check_alive()
                if answer.finish is None:
                    self.counters.progress += 1
                    _add_token(
                        answer,
                        tokens,
                        request.sampling,
                        version=self.version,
                        vocab_size=self.vocab_size,
                    )
                if stream or answer.finish is not None:
                    yield answer
            self.counters.count(answer)
        finally:
            del self.running[request.rid]

    async def abort(self, rid: str, *, every: bool = False) -> None:
        for answer in self.running.values():
            if (every or answer.rid == rid) and answer.finish is None:
                answer.finish = Finish.ABORT

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode is PauseMode.ABORT:
            await self.abort("", every=True)

    async def resume(self) -> None:
        self.paused = False

    async def update_weights(self, source: WeightSource) -> WeightsTaken:
        self._check_alive()
        self.sources.append(source)
        await asyncio.sleep(self.update_s)
        if self.refuse_weights is not None:
            raise self.refuse_weights
        if source.path.startswith("/nowhere"):
            raise ConfigError(f"no folder {source.path}", where="path", fix="give one that exists")
        self.version = source.version
        began_s = time.perf_counter() - self.update_s
        return self.counters.count_update(source.version, began_s, paused_s=0.0, num_bytes=1)

    async def set_version(self, version: int) -> None:
        self.version = version

    async def flush(self) -> None:
        self._check_alive()

    async def info(self) -> ServerInfo:
        self._check_alive()
        return ServerInfo(
            engine="double",
            model_path="double",
            weight_version=self.version,
            num_running=len(self.running),
            num_tokens=sum(a.prompt_tokens + len(a.output_ids) for a in self.running.values()),
            max_running=self.max_running,
            paused=self.paused,
        )

    async def ended(self) -> None:
        await self._died.wait()
        self._check_alive()

    def die(self, why: str = "killed by a test") -> None:
        """The engine has ended: everything raises WorkerLost from now on."""
        self.dead = why
        self._died.set()

    async def close(self) -> None:
        await self.abort("", every=True)

    def _check_alive(self) -> None:
        if self.dead:
            raise WorkerLost(f"the engine has ended: {self.dead}", where="the double", fix="none")


class ServerDouble:
    """``DoubleEngine`` behind the real HTTPS front, on loopback."""

    def __init__(
        self,
        engine: DoubleEngine | None = None,
        *,
        index: int = 0,
        key: str = KEY,
        max_requests: int = 4096,
    ) -> None:
        self.engine = engine or DoubleEngine()
        self.index, self.key, self.name = index, key, f"generation_server/{index}"
        app = generation_app(self.engine, key=key, max_requests=max_requests)
        self._listener = HttpListener(app)
        self._clients: list[FullClient] = []

    @property
    def url(self) -> str:
        """As a server registers it."""
        return self._listener.url

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(index=self.index, url=self.url)

    def client(self, *, key: str | None = None) -> FullClient:
        """A client of it, closed with the server."""
        client = FullClient(self.url, key or self.key, name=self.name)
        self._clients.append(client)
        return client

    async def __aenter__(self) -> Self:
        await self.engine.start()
        await self._listener.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in self._clients:
            await client.close()
        await self.stop()

    async def stop(self) -> None:
        """As if it was killed: connections are cut."""
        await self.engine.close()
        await self._listener.stop()


async def _main() -> None:
    async with ServerDouble() as server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
