"""A generation server without a trial, for tests and benchmarks: ``python -m engines.serve``.

Reads one line of JSON, ``{"key", "log", "scratch", "config": {fields of GenerationServer}}``, prints its
URL and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realsys.api.worker_configs import GenerationServer
from realsys.generation_server.build import fetch_with
from realsys.generation_server.engine import make_engine
from realsys.serving.app import generation_app
from realsys.serving.listener import HttpsListener
from realsys.weight_sync.receiver import WeightReceiver

TESTS = Path(__file__).parents[1]
KEY = "key of a test"


@contextmanager
def server_process(
    folder: Path, config: Mapping[str, Any], *, key: str = KEY, start_timeout_s: float = 300.0
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts one; gives its URL and its process, and ends it."""
    log = folder / "server.log"
    said = json.dumps(
        {"key": key, "log": str(folder / "child.log"), "scratch": str(folder), "config": config}
    )
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "engines.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
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
    receiver = WeightReceiver(_no_trainers)
    engine = make_engine(
        config,
        name="generation_server/0",
        log=Path(said["log"]),
        scratch=Path(said["scratch"]),
        fetch=fetch_with(receiver),
    )
    listener = HttpsListener(generation_app(engine, key=said["key"]))
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


def _no_trainers(endpoints: tuple[str, ...]) -> Any:
    raise AssertionError(f"nobody listens at {endpoints}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(_main())
