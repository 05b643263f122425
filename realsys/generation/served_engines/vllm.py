"""``ServedEngine`` over a vLLM server as a child process, on a private Unix socket.

Its control paths exist in its development mode only and take no key, so no port is opened: the socket is
in a folder that only we can enter. Tokens in and out go over /inference/v1/generate. Not the same as with
us: ``position`` is left out (each piece of an answer has a seed of its own), and with ``top_p``, ``top_k``
or ``min_new_tokens`` log-probs are of what these leave over. For ids without a text see redrawn_answer.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from realsys.api.errors import DataError, RemoteError
from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.http_answers import TokenSpan, version_number, versions_of
from realsys.generation.http.http_json import seed_of_piece
from realsys.generation.http.http_session import HttpSession
from realsys.generation.http.served_engine import EngineAnswer, Fetch
from realsys.generation.served_engines.child import ChildServer, Guard, options
from realsys.generation.served_engines.fronted import (
    CONTROL_S,
    IDLE_S,
    REQUEST_S,
    FrontedEngine,
    engine_seed,
)
from realsys.transport.generation_messages import Finish, GenerateRequest, PauseMode

_PAUSES = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep", PauseMode.IN_PLACE: "keep"}
_PREFIX = "generate-tokens-"  # prefix of its request ids before ours
_BARRED = -100.0  # added to logits: the lowest that OpenAI's API has
_WORK = ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[TokenSpan] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _VllmResponse(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class VLLMEngine(FrontedEngine):
    """vLLM as ``python -m vllm.entrypoints.openai.api_server``. Args: as ``SGLangEngine``."""

    kind = "vllm"
    length_option = "max_model_len"

    def __init__(
        self,
        config: GenerationServer,
        fetch: Fetch,
        *,
        name: str,
        log: Path,
        guard: Guard,
        start: str = "",
    ) -> None:
        super().__init__(config, fetch)
        # In the system's own folder: a socket's path may have 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="realsys-vllm-")
        uds = str(Path(self._folder.name) / "http")
        args = {
            "model": config.model_path,
            "tensor_parallel_size": config.tp_size,
            "skip_tokenizer_init": True,
            "enable_scale_out": True,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            **self._theirs,
            "seed": engine_seed(self._theirs.get("seed", config.base_seed), name, start),
            "uds": uds,
        }
        argv = [self._python(), "-m", "vllm.entrypoints.openai.api_server", *options(args)]
        whole = f"vLLM of {name}"
        env = {"VLLM_SERVER_DEV_MODE": "1", **self._env()}
        self._child = ChildServer(argv, name=whole, log=log, env=env, guard=guard)
        session = partial(HttpSession, "http://127.0.0.1", "", name=whole, unix_socket=uds)
        self._http = session(limit=0, idle_s=IDLE_S)
        self._control = session(idle_s=IDLE_S)
        self._steps_seen = -1.0

    async def close(self) -> None:
        await super().close()
        self._folder.cleanup()

    async def _answers(
        self, request: GenerateRequest, *, stream: bool, barred: Collection[int]
    ) -> AsyncIterator[EngineAnswer]:
        body = vllm_body(request, stream=stream, caches=self._caches, barred=barred)
        answer = EngineAnswer(rid=request.rid, prompt_tokens=len(request.input_ids))
        path, version = "/inference/v1/generate", self._version
        if not stream:
            data = await self._http.call("POST", path, body, timeout_s=REQUEST_S)
            yield _extended(answer, data, version)
            return
        async for data in self._http.events(path, body, timeout_s=REQUEST_S):
            if b'"error"' in data[:12]:
                raise self._http.refusal(data, 200, path)
            answer = _extended(answer, data, self._version)
            yield answer

    async def _abort(self, rid: str, *, every: bool) -> None:
        body = {"request_ids": [] if every else [_PREFIX + rid]}
        await self._control.call("POST", "/abort_requests", body, timeout_s=CONTROL_S)

    async def _pause(self, mode: PauseMode) -> None:
        clear = str(mode is PauseMode.ABORT).lower()
        path = f"/pause?mode={_PAUSES[mode]}&clear_cache={clear}"
        await self._control.call("POST", path, timeout_s=CONTROL_S)
        if mode is PauseMode.RETRACT:  # its running requests release their caches
            await self._reset_prefixes(running=True)

    async def _resume(self) -> None:
        await self._control.call("POST", "/resume", timeout_s=CONTROL_S)

    async def _load(self, path: str, version: int, *, keep_caches: bool, timeout_s: float) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._control.call("POST", "/collective_rpc", body, timeout_s=timeout_s)
        await self._name_version(version)
        if not keep_caches:
            await self._reset_prefixes(running=True)

    async def _name_version(self, version: int) -> None:
        body = {"new_version": str(version)}
        await self._control.call("POST", "/update_weight_version", body, timeout_s=CONTROL_S)

    async def flush(self) -> None:
        await self._reset_prefixes(running=False)

    async def _reset_prefixes(self, *, running: bool) -> None:
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        data = await self._control.call("POST", path, timeout_s=CONTROL_S)
        if running and b"true" not in data:
            raise RemoteError(
                "vLLM did not drop the caches of old weights", where=path, fix="see its log"
            )

    async def _healthy(self) -> bool:
        await self._control.call("GET", "/health", timeout_s=20.0)
        return True

    async def _made_progress(self) -> bool:
        text = await self._control.call("GET", "/metrics", timeout_s=CONTROL_S)
        steps = work_done(text.decode(errors="replace"))
        former, self._steps_seen = self._steps_seen, -1.0 if steps is None else steps
        return steps is None or steps != former

    @property
    def _max_running(self) -> int:
        return int(self._theirs.get("max_num_seqs") or 0)


def work_done(metrics: str) -> float | None:
    """Sums vLLM's counters of steps and tokens in its Prometheus text; None if counting is disabled.

    >>> work_done('vllm:generation_tokens_total{engine="0"} 20.0')
    20.0
    >>> work_done('vllm:generation_tokens_created{engine="0"} 1.7e9')
    """
    counts = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.partition("{")[0].partition(" ")[0] in _WORK
    ]
    return sum(counts) if counts else None


def vllm_body(
    request: GenerateRequest, *, stream: bool, caches: str = "", barred: Collection[int] = ()
) -> dict[str, Any]:
    """Builds the body of /inference/v1/generate.

    Args:
        caches: only prefixes of requests with the same one are reused.
        barred: ids that must not be sampled. Log-probs are then over the others.
    """
    sampling = request.sampling
    params = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,  # the picked token's alone
        "detokenize": False,
    }
    if sampling.stop:
        params |= {"stop": sampling.stop, "detokenize": True}
    if sampling.sampling_seed is not None:
        params["seed"] = seed_of_piece(sampling)
    if barred:
        params["logit_bias"] = {str(i): _BARRED for i in barred}
    body = {
        "request_id": request.rid,
        "token_ids": request.input_ids,
        "sampling_params": params,
        "stream": stream,
    }
    return {**body, "cache_salt": caches} if caches else body


def _extended(answer: EngineAnswer, data: bytes, version: int) -> EngineAnswer:
    """Returns ``answer`` extended by this part of the response."""
    try:
        response = msgspec.json.decode(data, type=_VllmResponse)
        if not response.choices:
            return answer  # usage alone
        choice = response.choices[0]
        tokens = choice.token_ids or []
        content = (choice.logprobs.content if choice.logprobs else None) or []
        output_ids = answer.output_ids + tokens
        versions = answer.versions + [version] * len(tokens)
        if choice.weight_versions is not None:  # sent with the last part, for the whole answer
            spans = [
                TokenSpan(str(version_number(s.version)), s.start, s.end)
                for s in choice.weight_versions
            ]
            versions = versions_of(spans, len(output_ids))
        details = response.usage.prompt_tokens_details if response.usage else None
        return EngineAnswer(
            rid=answer.rid,
            output_ids=output_ids,
            logprobs=answer.logprobs + [p.logprob for p in content],
            versions=versions,
            finish=Finish(choice.finish_reason) if choice.finish_reason else None,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=(details.cached_tokens if details else None) or 0,
        )
    except (msgspec.MsgspecError, ValueError) as error:
        what = f"vLLM's response to request {answer.rid!r} can't be read: {error}"
        raise DataError(what, where="/inference/v1/generate", fix="is it vLLM 0.32?") from None
