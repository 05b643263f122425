"""The HTTP front and its client, over an engine without a model: bounds, mistakes, who goes, who dies."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import golden
import pytest
from passing_time import pass_time
from serving_double import KEY, DoubleEngine, ServerDouble, double_answer

from realsys.api.errors import (
    ClusterError,
    DataError,
    RealsysError,
    RemoteError,
    WaitTimeout,
    WorkerLost,
)
from realsys.generation.http.http_client import HttpGenerationClient
from realsys.generation.http.http_session import HttpSession
from realsys.generation.served_engines.child import ChildServer
from realsys.generation.server.http_app import generation_app
from realsys.runtime.certificates import self_signed
from realsys.runtime.child_processes.child_guard import descendants, guarded
from realsys.transport.generation_messages import (
    Finish,
    GenerateRequest,
    PauseMode,
    Sampling,
    WeightSource,
)
from realsys.transport.http_listener import HttpListener

S = 240.0
Test = Callable[..., Coroutine[Any, Any, None]]


def running(test: Test) -> Callable[..., None]:
    """The coroutine function as a test that runs it."""

    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


def ask(rid: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=(3, 1, 4), sampling=Sampling(**sampling))


async def until(true: Callable[[], bool]) -> None:
    """Waits for it, some seconds at most."""
    async with asyncio.timeout(S):
        while not true():
            await asyncio.sleep(0.005)


@running
async def test_answers_come_as_the_engine_made_them() -> None:
    async with ServerDouble(DoubleEngine(version=6)) as server:
        client = server.client()
        asked = [ask(f"r{i}", max_new_tokens=i + 1, sampling_seed=i) for i in range(20)]
        results = await asyncio.gather(*(client.generate(r, timeout_s=S) for r in asked))
        for request, result in zip(asked, results, strict=True):
            expected = double_answer(request.input_ids, request.sampling, version=6)
            assert result == expected.result()
        assert server.engine.seen == asked


@running
async def test_one_too_many_is_refused_until_there_is_room() -> None:
    async with ServerDouble(DoubleEngine(hang=True), max_requests=3) as server:
        client = server.client()
        held = [asyncio.create_task(client.generate(ask(f"r{i}"), timeout_s=S)) for i in range(3)]
        await until(lambda: len(server.engine.running) == 3)
        with golden.raises(RemoteError):
            await client.generate(ask("r4"), timeout_s=S)
        server.engine.hang = False
        await asyncio.gather(*held)
        await client.generate(ask("r4"), timeout_s=S)


@running
async def test_a_cancelled_call_aborts_its_request_and_no_other() -> None:
    async with ServerDouble(DoubleEngine(hang=True)) as server:
        client = server.client()
        calls = [asyncio.create_task(client.generate(ask(f"r{i}"), timeout_s=S)) for i in range(2)]
        await until(lambda: len(server.engine.running) == 2)
        calls[0].cancel()
        await until(lambda: set(server.engine.running) == {"r1"})
        server.engine.hang = False
        assert (await calls[1]).finish is Finish.LENGTH


def test_a_closed_session_waits_for_no_servers_goodbye(tmp_path: Path) -> None:
    certificate = self_signed("silent", "127.0.0.1")
    pem = tmp_path / "pem"
    pem.write_text(certificate.key_pem + certificate.cert_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    async def cancelled_call(listener: socket.socket) -> socket.socket:
        port = listener.getsockname()[1]
        http = HttpSession(f"https://127.0.0.1:{port}#sha256={certificate.sha256}", KEY, name="s")
        call = asyncio.create_task(http.call("POST", "/generate", {}, timeout_s=S))
        silent = await asyncio.to_thread(request_of, listener)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await http.close()
        return silent

    def request_of(listener: socket.socket) -> socket.socket:
        silent = context.wrap_socket(listener.accept()[0], server_side=True)
        assert silent.recv(4) == b"POST"
        return silent

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(S)
        with asyncio.run(cancelled_call(listener)) as silent:
            silent.settimeout(S)
            with contextlib.suppress(ConnectionError):
                while silent.recv(1 << 10):
                    pass
            with pytest.raises((ConnectionError, ssl.SSLError)):  # nobody holds the other end open
                silent.sendall(bytes(64 << 20))


@running
async def test_one_bad_of_a_batch_ends_the_batch() -> None:
    async with ServerDouble(DoubleEngine(token_s=0.01)) as server:
        http = HttpSession(server.url, KEY, name="s")
        server.engine.fail_next = 1
        body = {"input_ids": [[1], [2], [3]], "sampling_params": {"max_new_tokens": 4000}}
        with golden.raises(DataError):
            await http.call("POST", "/generate", body, timeout_s=S)
        await until(lambda: not server.engine.running)
        await http.close()


@running
async def test_a_streams_mistake_comes_as_an_event() -> None:
    async with ServerDouble() as server:
        client = server.client()
        server.engine.fail_next = 1
        with golden.raises(DataError):
            async for _ in client.stream(ask("r"), timeout_s=S):
                pass


@running
async def test_a_stream_that_is_left_is_aborted() -> None:
    async with ServerDouble(DoubleEngine(token_s=0.001)) as server:
        client = server.client()
        answers = client.stream(ask("r", max_new_tokens=100_000), timeout_s=S)
        async for answer in answers:
            if len(answer.output_ids) > 3:
                break
        await answers.aclose()  # type: ignore[attr-defined]
        await until(lambda: not server.engine.running)


@running
async def test_a_dead_engine_is_a_lost_worker() -> None:
    async with ServerDouble(DoubleEngine(hang=True)) as server:
        client = server.client()
        waiting = asyncio.create_task(client.generate(ask("r"), timeout_s=S))
        await until(lambda: bool(server.engine.running))
        server.engine.die()
        with golden.raises(WorkerLost):
            await waiting
        assert not await client.healthy()
        http = HttpSession(server.url, KEY, name="s")
        with golden.raises(RemoteError):
            await http.call("GET", "/health", timeout_s=S)
        await http.close()


@running
async def test_a_server_that_makes_no_token_is_not_healthy() -> None:
    async with ServerDouble(DoubleEngine(hang=True)) as server:
        assert not await server.client().healthy(timeout_s=0.5)
        await until(lambda: not server.engine.running)


@running
async def test_a_server_that_goes_away_is_lost() -> None:
    server = ServerDouble(DoubleEngine(hang=True))
    async with server:
        client = server.client()
        waiting = asyncio.create_task(client.generate(ask("r"), timeout_s=S))
        await until(lambda: bool(server.engine.running))
        server.engine.die("gone")
    with golden.raises(WorkerLost):
        await waiting
    late = HttpGenerationClient(server.url, KEY, name="generation_server/0")
    with golden.raises(WorkerLost):
        await late.info()
    await late.close()


@running
async def test_weights_are_changed_to_the_end_though_nobody_waits() -> None:
    async with ServerDouble(DoubleEngine(update_s=10 * S)) as server:
        client = server.client()
        source = WeightSource(version=3, path="/x")
        update = asyncio.create_task(client.update_weights(source, timeout_s=S))
        await until(lambda: bool(server.engine.sources))
        pass_time(S)
        with pytest.raises(WaitTimeout):
            await update
        assert (await client.info()).weight_version == 0
        pass_time(10 * S)
        await until(lambda: server.engine.version == 3)


@running
async def test_weights_are_changed_one_at_a_time() -> None:
    async with ServerDouble(DoubleEngine(update_s=0.1)) as server:
        client = server.client()
        sources = [WeightSource(version=v, path="/x") for v in (1, 2, 3)]
        took = await asyncio.gather(*(client.update_weights(s, timeout_s=S) for s in sources))
        assert sorted(t.version for t in took) == [1, 2, 3]
        assert server.engine.version == server.engine.sources[-1].version


@running
async def test_a_refused_change_of_weights_says_why() -> None:
    async with ServerDouble(DoubleEngine(version=5)) as server:
        client = server.client()
        with golden.raises(RemoteError):
            await client.update_weights(WeightSource(version=6, path="/nowhere"), timeout_s=S)
        with golden.raises(DataError):
            await client.update_weights(WeightSource(version=6), timeout_s=S)
        assert (await client.info()).weight_version == 5


@running
async def test_control_paths_refuse_what_they_do_not_know() -> None:
    async with ServerDouble() as server:
        http = HttpSession(server.url, KEY, name="s")
        for path, body in (
            ("/pause_generation", {"mode": "gently"}),
            ("/pause_generation", {"mod": "abort"}),
            ("/abort_request", {}),
            ("/update_weights_from_disk", {"model_path": "/x", "weight_version": "new"}),
            ("/update_weights_from_disk", {}),
        ):
            with golden.raises(DataError):
                await http.call("POST", path, body, timeout_s=S)
        await http.close()


@running
async def test_sglangs_clients_are_understood() -> None:
    """What they send that means nothing here, and what they read."""
    async with ServerDouble() as server:
        http = HttpSession(server.url, KEY, name="s")

        async def post(path: str, body: Any) -> Any:
            data = await http.call("POST", path, body, timeout_s=S)
            return json.loads(data) if data else None

        assert await post("/pause_generation", {}) == {
            "message": "Generation paused successfully.",
            "status": "ok",
        }
        await post("/continue_generation", {"torch_empty_cache": False})
        body = {"model_path": "/x", "load_format": "auto", "flush_cache": True}
        assert (await post("/update_weights_from_disk", body))["success"] is True
        assert server.engine.version == 1  # other weights, another version
        told = await post("/update_weight_version", {"new_version": "9"})
        assert told["new_version"] == "9"
        answer = await post("/generate", {"input_ids": [1], "sampling_params": {"n": 2}})
        assert [a["meta_info"]["weight_version"] for a in answer] == ["9", "9"]
        assert answer[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
        assert len(answer[0]["meta_info"]["output_token_logprobs"]) == 128
        await http.close()


@running
async def test_a_pause_that_aborts_keeps_tokens() -> None:
    async with ServerDouble(DoubleEngine(token_s=0.001)) as server:
        client = server.client()
        call = asyncio.create_task(client.generate(ask("r", max_new_tokens=10_000), timeout_s=S))
        await until(lambda: any(a.output_ids for a in server.engine.running.values()))
        await client.pause(PauseMode.ABORT)
        result = await call
        assert result.finish is Finish.ABORT
        assert result.output_ids


@running
async def test_strangers_bodies_are_bounded() -> None:
    async with ServerDouble() as server:
        http = HttpSession(server.url, KEY, name="s")
        with pytest.raises(RealsysError, match=r"413|lost"):
            await http.call("POST", "/generate", {"text": "x" * (65 << 20)}, timeout_s=S)
        assert await server.client().healthy(timeout_s=S)
        await http.close()


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"  # needs no key


async def read_all(url: str, sent: bytes, *, tls: bool, silent: asyncio.Event) -> bytes:
    """What a server says to a stranger who sends this and then, ``silent``, nothing."""
    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port, ssl=context if tls else None
    )
    writer.write(sent)
    heard = await reader.readuntil(b"\r\n\r\n") if b"\r\n\r\n" in sent else b""
    silent.set()
    with contextlib.suppress(ConnectionError):
        heard += await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return heard


@pytest.mark.parametrize(
    ("sent", "tls"),
    [
        (b"", True),
        (b"GET /server_info HTTP/1.1\r\nHost", True),
        (b"", False),
        (b"GET", False),
        (HEALTH, True),
        (HEALTH + b"GET /server_info HTTP/1.1\r\nHost", True),
        (b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n" + b"G", True),
    ],
)
def test_who_says_nothing_is_cut(sent: bytes, tls: bool) -> None:
    async def run() -> None:
        engine = DoubleEngine()
        await engine.start()
        listener = await HttpListener(generation_app(engine, key=KEY), silence_s=S).start()
        silent = asyncio.Event()
        stranger = asyncio.create_task(read_all(listener.url, sent, tls=tls, silent=silent))
        if tls:  # else it waits for the server's handshake
            await silent.wait()
        while not stranger.done():  # it may take a while to be noticed
            await asyncio.sleep(0.05)
            pass_time(S)
        told = [int(part.split()[0]) for part in stranger.result().split(b"HTTP/1.1 ")[1:]]
        assert told == ([] if b"\r\n\r\n" not in sent else [200] if HEALTH in sent else [401])
        client = HttpGenerationClient(listener.url, KEY, name="s")
        assert await client.healthy(timeout_s=S)
        await asyncio.sleep(0.05)
        pass_time(3 * S)  # longer than a silent one has
        await asyncio.sleep(0.05)
        server = await client.info()
        assert server.engine == "double"
        await client.close()
        await listener.stop()

    asyncio.run(run())


@running
async def test_a_taken_port_is_passed_over() -> None:
    async with ServerDouble() as server:
        taken = urlsplit(server.url).port
        app = generation_app(server.engine, key=KEY)
        with golden.raises(ClusterError):
            await HttpListener(app, ports=[taken]).start()
        app = generation_app(server.engine, key=KEY)
        other = await HttpListener(app, ports=[taken, 0]).start()
        assert urlsplit(other.url).port != taken
        await other.stop()


# ---- children -------------------------------------------------------------------------------------

# Starts a process of its own that leaves its group, says who both are, and goes on for ever.
SERVER_OF_OTHERS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def pids_in(log: Path) -> list[int]:
    """What the server of others has said of itself."""
    words = log.read_text().split() if log.exists() else []
    return [int(word) for word in words[1:3]] if len(words) >= 3 else []


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def _well(log: Path) -> bool:
    return bool(pids_in(log))


def child_of(log: Path, code: str) -> ChildServer:
    argv = [sys.executable, "-c", code]
    return ChildServer(argv, name="the child", log=log, env={}, guard=guarded)


@running
async def test_a_child_ends_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = child_of(log, SERVER_OF_OTHERS)
    await child.start(lambda: _well(log), timeout_s=S)
    pids = pids_in(log)
    assert all(alive(pid) for pid in pids)
    assert log.stat().st_mode & 0o777 == 0o600
    await child.close()
    assert not any(alive(pid) for pid in pids)


@running
async def test_a_child_that_ends_is_told_with_its_last_words_and_the_setting(
    tmp_path: Path,
) -> None:
    """Not with forty lines of its traceback, as often as it was started."""
    child = child_of(tmp_path / "log", "def f(): raise ValueError('no such model')\nf()")
    with golden.raises(WorkerLost) as ended:
        await child.start(lambda: _well(tmp_path / "no"), timeout_s=S)
    assert ended.value.where == str(tmp_path / "log")
    assert "schedule.server_args" in ended.value.fix
    assert "Traceback" in (tmp_path / "log").read_text(), "the rest is where it says"


@running
async def test_a_child_that_is_killed_takes_its_own_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = child_of(log, SERVER_OF_OTHERS)
    await child.start(lambda: _well(log), timeout_s=S)
    server, its_own = pids_in(log)

    async def ended() -> None:
        while True:
            child.check()
            await asyncio.sleep(0.05)

    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="137"):
        await asyncio.wait_for(ended(), S)
    await until(lambda: not alive(its_own))


@running
async def test_a_child_that_does_not_get_well_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = child_of(log, SERVER_OF_OTHERS)
    with pytest.raises(WaitTimeout, match="start_timeout_s"):
        await child.start(lambda: _well(tmp_path / "no"), timeout_s=0.6)
    await child.close()


def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"""
import subprocess, sys, time
from realsys.runtime.certificates import self_signed
from realsys.runtime.child_processes.child_guard import guarded
subprocess.Popen(guarded([sys.executable, "-c", {SERVER_OF_OTHERS!r}]), stdout=open({str(log)!r}, "w"))
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline_s = time.monotonic() + S
    while not (pids := pids_in(log)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert set(pids) < set(descendants(parent.pid))
    parent.kill()
    parent.wait()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s + S, "they outlived their parent"
        time.sleep(0.02)
