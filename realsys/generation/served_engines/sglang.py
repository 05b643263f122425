"""``ServedEngine`` over an SGLang server as a child process, on loopback.

Its API is the model of ours, so little is translated. ``position`` is our extension and is left
out: SGLang's random numbers count from the first token of each request, so each has a seed of its own.
Seeds of requests count with ``enable_deterministic_inference`` only; without it answers are drawn from the
server's own, in which the servers of a fleet must differ.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.http_answers import read_answer
from realsys.generation.http.http_json import generate_body
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
from realsys.transport.generation_messages import GenerateRequest, PauseMode

_HOST = "127.0.0.1"
_BARRED = -1e9  # added to logits


class SGLangEngine(FrontedEngine):
    """SGLang as ``python -m sglang.launch_server``.

    Args:
        log, guard: see ``ChildServer``.
        scratch: private folder for a 0600 file with the child's key, which must not be in argv.
        start: differs each time that the server ``name`` is started, so that it draws other numbers.
    """

    kind = "sglang"
    length_option = "context_length"
    positions_kept_back = 8  # a prompt of context_length - 6 tokens is refused already

    def __init__(
        self,
        config: GenerationServer,
        fetch: Fetch,
        *,
        name: str,
        log: Path,
        scratch: Path,
        guard: Guard,
        start: str = "",
    ) -> None:
        super().__init__(config, fetch)
        key, port = secrets.token_hex(32), _free_port()
        self._config = scratch / f"{name.replace('/', '-')}-sglang.yaml"
        descriptor = os.open(
            self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # if it was there already
            file.write(f"api-key: {key}\n")
        args = {
            "model_path": config.model_path,
            "tp_size": config.tp_size,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            **self._theirs,
            "random_seed": engine_seed(
                self._theirs.get("random_seed", config.base_seed), name, start
            ),
            "host": _HOST,
            "port": port,
            "config": self._config,
        }
        argv = [self._python(), "-m", "sglang.launch_server", *options(args)]
        whole = f"SGLang of {name}"
        self._child = ChildServer(argv, name=whole, log=log, env=self._env(), guard=guard)
        url = f"http://{_HOST}:{port}"
        self._http = HttpSession(url, key, name=whole, limit=0, idle_s=IDLE_S)
        self._control = HttpSession(url, key, name=whole, idle_s=IDLE_S)

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            self._config.unlink(missing_ok=True)  # it has been read

    async def _answers(
        self, request: GenerateRequest, *, stream: bool, barred: Collection[int]
    ) -> AsyncIterator[EngineAnswer]:
        body = sglang_body(request, stream=stream, caches=self._caches, barred=barred)
        if not stream:
            data = await self._http.call("POST", "/generate", body, timeout_s=REQUEST_S)
            yield read_answer(data, rid=request.rid)
            return
        async for data in self._http.events("/generate", body, timeout_s=REQUEST_S):
            if data.startswith(b'{"error"'):
                raise self._http.refusal(data, 200, "/generate")
            yield read_answer(data, rid=request.rid)

    async def _abort(self, rid: str, *, every: bool) -> None:
        body = {"rid": rid, "abort_all": every}
        await self._control.call("POST", "/abort_request", body, timeout_s=CONTROL_S)

    async def _pause(self, mode: PauseMode) -> None:
        body = {"mode": mode.value}
        await self._control.call("POST", "/pause_generation", body, timeout_s=CONTROL_S)

    async def _resume(self) -> None:
        await self._control.call("POST", "/continue_generation", {}, timeout_s=CONTROL_S)

    async def _load(self, path: str, version: int, *, keep_caches: bool, timeout_s: float) -> None:
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": not keep_caches,  # refused while running requests hold theirs
        }
        await self._control.call("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)

    async def _name_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control.call("POST", "/update_weight_version", body, timeout_s=CONTROL_S)

    async def flush(self) -> None:
        await self._control.call("POST", "/flush_cache", timeout_s=CONTROL_S)

    async def _healthy(self) -> bool:
        await self._control.call("GET", "/health", timeout_s=20.0)  # generates a token
        return True

    async def _made_progress(self) -> bool:
        # A token for this call, or any later output of its scheduler.
        await self._control.call("GET", "/health_generate", timeout_s=CONTROL_S)
        return True

    @property
    def _max_running(self) -> int:
        return int(self._theirs.get("max_running_requests") or 0)


def sglang_body(
    request: GenerateRequest, *, stream: bool, caches: str = "", barred: Collection[int] = ()
) -> dict[str, Any]:
    """Builds the body of /generate. Args: as ``vllm_body``."""
    body = generate_body(request, stream=stream, extended=False)
    if barred:
        body["sampling_params"]["logit_bias"] = {str(i): _BARRED for i in barred}
    return {**body, "extra_key": caches} if caches else body


def _free_port() -> int:
    """Finds a free port, since SGLang takes only a number. If it is taken meanwhile, the worker is
    restarted.
    """
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
