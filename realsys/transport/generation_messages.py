"""What a generation server and its clients say to each other, as values. No torch, no HTTP library.

JSON of these is SGLang's (http_json.py); ``GenerationClient`` is what everybody who needs tokens holds,
whatever engine is behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to pick tokens; names as in SGLang's ``sampling_params``.

    Attributes:
        max_new_tokens: of this request, not of the whole answer.
        temperature: 0 is greedy.
        top_k: -1 is off.
        sampling_seed: of the answer; None draws one.
        position: index in the answer of the first token of this request: the random number behind a
            token belongs to (seed, index in the answer), so an answer made in chunks is the same as one
            made at once. Ours; other engines don't know it.
        stop: texts that end the answer; need a tokenizer at the server.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    position: int = 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Go on from these tokens: a prompt, or a prompt and the part of its answer that is there."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: Sampling = Sampling()


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token or text
    LENGTH = "length"  # max_new_tokens
    ABORT = "abort"  # somebody asked; the tokens so far are kept


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The new tokens; for each a log-prob (at the sampling temperature, whole vocabulary) and a version."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    prompt_tokens: int = 0
    cached_tokens: int = 0


class PauseMode(StrEnum):
    """What becomes of running requests at a pause (SGLang's names)."""

    ABORT = "abort"  # they end, with their tokens so far
    RETRACT = "retract"  # they go on after the pause, from their tokens, read anew
    IN_PLACE = "in_place"  # they go on after the pause with what is cached


class WeightPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer gives: the manifest called ``name`` at its tensor server."""

    endpoint: str
    name: str


class WeightSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the weights of a version are: a Hugging Face folder, or parts to fetch from trainers.

    ``routes``: server → its own parts, where not all servers take them from the same trainers.
    ``num_bytes``: that a server gets, at most; 0: not known.
    """

    version: int
    path: str = ""
    parts: tuple[WeightPart, ...] = ()
    routes: Mapping[int, tuple[WeightPart, ...]] = {}
    num_bytes: int = 0

    def of_server(self, index: int) -> WeightSource:
        """What server ``index`` takes."""
        parts = self.routes.get(index, self.parts)
        return WeightSource(
            version=self.version, path=self.path, parts=parts, num_bytes=self.num_bytes
        )


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """A server has switched. ``paused_s`` is how long decoding stood still."""

    version: int
    seconds: float = 0.0
    paused_s: float = 0.0
    num_bytes: int = 0


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    engine: str  # embedded | sglang | vllm
    model_path: str
    weight_version: int
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0  # held by running and waiting requests
    max_running: int = 0
    paused: bool = False


class GenerationClient(Protocol):
    """One server. Every call has a deadline; errors are RealsysErrors that name the server."""

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResult:
        """Raises WaitTimeout (the request is then aborted), WorkerLost (no connection, or it broke)."""

    async def abort(self, rid: str = "", *, every: bool = False) -> None:
        """Ends one request, or all: each returns what it has, with finish ``abort``."""

    async def pause(self, mode: PauseMode = PauseMode.RETRACT) -> None:
        """Stops decoding; new requests wait."""

    async def resume(self) -> None:
        """Goes on."""

    async def update_weights(self, source: WeightSource, *, timeout_s: float) -> WeightsTaken:
        """Switches to another version between two decoding steps; running requests go on with it."""

    async def flush_cache(self) -> None:
        """Forgets cached prefixes."""

    async def info(self, *, timeout_s: float = 5.0) -> ServerInfo:
        """Also says that it is alive."""

    async def healthy(self, *, timeout_s: float = 5.0) -> bool:
        """Whether it answers a health check that includes a token."""

    async def metrics(self) -> str:
        """Prometheus text."""

    async def close(self) -> None:
        """Closes connections."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where a server listens. ``url`` carries the SHA-256 of its certificate: ``https://h:p#sha256=…``."""

    index: int
    url: str
