"""A generation server without a trial, for tests and benchmarks: ``python -m engines.serve``.

Reads one line of JSON, ``{"key", "name", "log", "scratch", "held", "config"}``, the last one with fields of
a GenerationServer, prints its URL and ends when its standard input does. ``held``: folders that it reads at
its start, and gives the engine later as if they came from trainers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realsys.api.errors import RemoteError
from realsys.api.worker_configs import GenerationServer
from realsys.generation.http.served_engine import Fetch, FetchedWeights
from realsys.generation.server.build import fetch_with, make_engine
from realsys.generation.server.http_app import generation_app
from realsys.transport.generation_messages import WeightSource
from realsys.transport.http_listener import HttpListener
from realsys.weights.sync.receiver import WeightReceiver, read_folder

TESTS = Path(__file__).parents[2]
KEY = "key of a test"
HELD = "held://"  # endpoint of weights that the server's process holds


@contextmanager
def server_process(
    folder: Path,
    config: Mapping[str, Any],
    *,
    key: str = KEY,
    held: Sequence[str] = (),
    name: str = "generation_server/0",
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts one; gives its URL and its process, and ends it."""
    log = folder / "server.log"
    paths = {"log": str(folder / "child.log"), "scratch": str(folder)}
    said = json.dumps({"key": key, "name": name, "held": held, "config": config, **paths})
    python_path = os.pathsep.join(
        [str(TESTS.parent), str(TESTS / "by_hand"), str(TESTS / "support")]
    )
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "engines.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(said + "\n")
        process.stdin.flush()
        url = process.stdout.readline().strip()
        assert url, f"the server did not start:\n{log.read_text()[-4000:]}"
        yield url, process
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def _main() -> None:
    said = json.loads(sys.stdin.readline())
    config = GenerationServer(**said["config"])
    fetch = _fetch_with(WeightReceiver(_no_trainers), said["held"])
    engine = make_engine(
        config,
        name=said["name"],
        log=Path(said["log"]),
        scratch=Path(said["scratch"]),
        fetch=fetch,
    )
    listener = HttpListener(generation_app(engine, key=said["key"]))
    try:
        await engine.start()
        await listener.start()
        sys.stdout.write(listener.url + "\n")
        sys.stdout.flush()
        over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        ended = asyncio.create_task(engine.ended())
        await asyncio.wait({over, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        ended.cancel()
    finally:
        await engine.close()
        await listener.stop()


def _fetch_with(receiver: WeightReceiver, held: Sequence[str]) -> Fetch:
    """As the worker's own, and of what is held here."""
    from_trainers = fetch_with(receiver)
    # Copies: what safetensors gives is still in the file.
    weights = {path: {n: x.clone() for n, x in read_folder(path).items()} for path in held}

    def fetch(source: WeightSource) -> FetchedWeights:
        if not source.parts or source.parts[0].endpoint != HELD:
            return from_trainers(source)
        name = source.parts[0].name
        if name not in weights:
            raise RemoteError(f"nobody gives {name}", where="trainers of a test", fix="publish it")
        return FetchedWeights(weights[name], sum(x.nbytes for x in weights[name].values()))

    return fetch


def _no_trainers(endpoints: tuple[str, ...]) -> Any:
    raise AssertionError(f"nobody listens at {endpoints}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(_main())
