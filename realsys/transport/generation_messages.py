"""Messages between a generation server and its clients, as values. No torch, no HTTP library.

Their JSON is SGLang's (http_json.py). ``GenerationClient`` is the interface that callers use for
any engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters; names as in SGLang's ``sampling_params``.

    Attributes:
        max_new_tokens: of this request, not of the whole answer.
        temperature: 0 is greedy.
        top_k: -1 is off.
        sampling_seed: of the answer; None draws one.
        position: index in the answer of the first token of this request: the random number of a token
            is determined by (seed, index in the answer), so an answer generated in chunks equals one
            generated at once. An extension; other engines don't support it and get a seed for each piece.
        stop: texts that end the answer; require a tokenizer at the server.
        return_kept: log-probs are of the distribution sampled from, over the tokens that ``top_p``,
            ``top_k`` and ``min_new_tokens`` keep, and these are returned too. An extension; other engines
            only support it without these, see ``fronted.py``.
        grammar: what the whole answer must be, see ``token_grammar.py``; empty: anything.
            ``min_new_tokens`` gives way to it. It restricts as ``top_k`` does. An extension.
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
    return_kept: bool = False
    grammar: str = ""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continues these tokens: a prompt, or a prompt and the first part of its answer."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: Sampling = Sampling()


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token or text
    LENGTH = "length"  # max_new_tokens
    ABORT = "abort"  # aborted on request; the tokens so far are kept


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The new tokens, each with a log-prob (at the sampling temperature, over the whole vocabulary)
    and a weight version.

    With ``return_kept`` log-probs are over kept sets, and ``kept`` has one for each token: int32 in bytes,
    the ids kept, or ``~id`` of each left out; empty: the whole vocabulary. ``context_length``: most tokens
    of prompt and answer together, told where the prompt leaves no room for an answer; 0: it was not told.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept: tuple[bytes, ...] = ()
    context_length: int = 0


class PauseMode(StrEnum):
    """What happens to running requests at a pause (SGLang's names)."""

    ABORT = "abort"  # they end, with their tokens so far
    RETRACT = "retract"  # they continue after the pause, with their tokens prefilled again
    IN_PLACE = "in_place"  # they continue after the pause with their cache


class WeightPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the weights that one trainer serves: the manifest ``name`` at its tensor server."""

    endpoint: str
    name: str


class WeightSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the weights of a version are: a Hugging Face folder, or parts to fetch from trainers.

    ``routes``: server → its own parts, if not all servers fetch from the same trainers.
    ``num_bytes``: upper bound of what a server fetches; 0: unknown.
    """

    version: int
    path: str = ""
    parts: tuple[WeightPart, ...] = ()
    routes: Mapping[int, tuple[WeightPart, ...]] = {}
    num_bytes: int = 0

    def of_server(self, index: int) -> WeightSource:
        """Returns the source for server ``index``."""
        parts = self.routes.get(index, self.parts)
        return WeightSource(
            version=self.version, path=self.path, parts=parts, num_bytes=self.num_bytes
        )


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """A server has switched weights. ``paused_s`` is how long decoding was paused."""

    version: int
    seconds: float = 0.0
    paused_s: float = 0.0
    num_bytes: int = 0


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """State of a server, as reported by itself. ``updating``: it decodes nothing while its engine takes new
    weights; not ``paused`` by anybody."""

    engine: str  # embedded | sglang | vllm
    model_path: str
    weight_version: int
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0  # held by running and waiting requests
    max_running: int = 0
    paused: bool = False
    updating: bool = False


class GenerationClient(Protocol):
    """Client of one server. Every call has a deadline; errors are RealsysErrors that name the
    server."""

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResult:
        """Generates tokens. Raises WaitTimeout (the request is then aborted) or WorkerLost (no
        connection, or it broke)."""

    async def abort(self, rid: str = "", *, every: bool = False) -> None:
        """Ends one request, or all; each returns its tokens so far with finish ``abort``."""

    async def update_weights(self, source: WeightSource, *, timeout_s: float) -> WeightsTaken:
        """Switches to another version between two decoding steps; running requests continue with
        it."""

    async def info(self, *, timeout_s: float = 5.0) -> ServerInfo:
        """Returns the server's state, which also shows that it is alive."""

    async def healthy(self, *, timeout_s: float = 5.0) -> bool:
        """Returns whether the server passes a health check that generates a token."""

    async def close(self) -> None:
        """Closes the connections."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where a server listens. ``url`` carries the SHA-256 of its certificate:
    ``https://h:p#sha256=…``."""

    index: int
    url: str
