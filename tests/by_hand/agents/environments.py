"""Environments of others as they come from PyPI: openenv-core's own servers, gymnasium's environments.

By hand, a minute, in an environment of their own, with the packages that env/environments.txt pins:

    bash tests/by_hand/agents/env/install environments .agents/environments
    .agents/environments/bin/python tests/by_hand/agents/environments.py  writes results/environments.json
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support")]

from by_hand import HandCheck  # noqa: E402

from realsys.api.agent import Environment, Observation  # noqa: E402
from realsys.api.errors import RolloutError  # noqa: E402
from realsys.rollout.environments.gymnasium_environment import GymnasiumEnvironment  # noqa: E402
from realsys.rollout.environments.openenv_environment import OpenEnvEnvironment  # noqa: E402

START_S = 180


def main() -> int:
    """Returns 0 where all episodes went as they must."""
    check = HandCheck(__file__)
    with ExitStack() as stack:
        urls = {kind: stack.enter_context(_Server(kind)) for kind in ("word", "grid", "tools")}
        found = asyncio.run(episodes({kind: server.url for kind, server in urls.items()}))
    problems = [
        f"{name}: {got}, and not {wanted}" for name, (got, wanted) in found.items() if got != wanted
    ]
    return check.write(
        "episodes in environments of others",
        problems,
        packages={name: version(name) for name in ("openenv-core", "gymnasium")},
        episodes={name: got for name, (got, _) in found.items()},
    )


async def episodes(urls: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    """What each episode came to, and what it must."""
    word, grid, tools = urls["word"], urls["grid"], urls["tools"]
    return {
        "openenv: a text": (
            await played(OpenEnvEnvironment(url=word), {"seed": 1}, "x", "bbb"),
            ["a word of b", ("no", 0.0, False), ("no", 1.0, True)],
        ),
        "openenv: by HTTP": (
            await played(OpenEnvEnvironment(url=word, transport="http"), {}, "x"),
            ["a word of a", ("no", 0.0, False)],
        ),
        "openenv: JSON": (
            await played(
                OpenEnvEnvironment(url=grid), {}, "north", '{"x": 1}', 'go {"x": 3, "y": 4}'
            ),
            [
                '{"x": 0, "y": 0}',
                ("Error: answer with one JSON object whose fields are x, y", 0.0, False),
                ("Error: the environment refused step: VALIDATION_ERROR Invalid", 0.0, False),
                ('{"x": 3, "y": 4}', 1.0, True),
            ],
        ),
        "openenv: an environment that raises": (
            await played(OpenEnvEnvironment(url=word), {}, "crash"),
            ["a word of a", "the environment refused step: EXECUTION_ERROR the environment broke"],
        ),
        "openenv: tools": (
            await called(OpenEnvEnvironment(url=tools, offer_tools=True)),
            [["add"], ("3", False), ("Error: ", False), ("Error: Unknown tool: 'no'", False), True],
        ),
        "openenv: four episodes where two have a place": (
            await asyncio.gather(*(held(OpenEnvEnvironment(url=word)) for _ in range(4))),
            ["a word of a"] * 4,
        ),
        "gymnasium: a number": (
            await played(
                GymnasiumEnvironment(id="FrozenLake-v1", kwargs={"is_slippery": False}),
                {},
                *("go 2", "9", "1"),
            ),
            [
                "0",
                ("1", 0.0, False),
                ("Error: answer with a whole number from 0 to 3", 0.0, False),
                ("", 0.0, True),
            ],
        ),
        "gymnasium: a drawing": (
            await played(
                GymnasiumEnvironment(
                    id="FrozenLake-v1", kwargs={"is_slippery": False}, show="render"
                ),
                {},
                "2",
            ),
            ["\n[S]FFF\nFHFH\nFFFH\nHFFG\n", ("  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n", 0.0, False)],
        ),
        "gymnasium: JSON, of no space": (
            [said[1] for said in (await played(pendulum(), {"seed": 3}, "0.5", "[99]", "{}"))[1:]],
            [0.0, 0.0, 0.0],
        ),
        "gymnasium: JSON, the same from the same seed": (
            await played(pendulum(), {"seed": 3}, "[0.5]"),
            await played(pendulum(), {"seed": 3}, "[0.5]"),
        ),
    }


def pendulum() -> GymnasiumEnvironment:
    """Numbers for actions."""
    return GymnasiumEnvironment(id="Pendulum-v1")


async def played(environment: Environment, record: Mapping[str, Any], *actions: str) -> list[Any]:
    """The opening, and what came of each action; the last may be an error."""
    try:
        await environment.reset({"prompt": "?", **record})
        made: list[Any] = [environment.opening()]
        for action in actions:
            made.append(_shown(await environment.step(action)))
        return made
    except RolloutError as error:
        return [*made, error.what]
    finally:
        await environment.close()


def _shown(said: Observation) -> tuple[str, float, bool]:
    text = said.text if not said.text.startswith("Error: the env") else said.text[:61]
    return text, said.reward, said.done


async def called(environment: OpenEnvEnvironment) -> list[Any]:
    """The tools, what came of calls, and whether an answer ends the episode."""
    try:
        await environment.reset({"prompt": "?"})
        names = [tool["function"]["name"] for tool in environment.tools()]
        right = await environment.call("add", {"a": 1, "b": 2})
        wrong = await environment.call("add", {"a": "x"})
        unknown = await environment.call("no", {})
        last = await environment.step("3")
        return [
            names,
            (right.text, right.done),
            (wrong.text[:7], wrong.done),
            (unknown.text, unknown.done),
            last.done,
        ]
    finally:
        await environment.close()


async def held(environment: OpenEnvEnvironment) -> str:
    """An episode that takes its time."""
    try:
        await environment.reset({"prompt": "?"})
        await asyncio.sleep(1)
        return environment.opening()
    finally:
        await environment.close()


class _Server:
    """One of programs/openenv_servers.py on a free port, while the block runs."""

    def __init__(self, kind: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._argv = [
            sys.executable,
            str(HERE / "programs" / "openenv_servers.py"),
            kind,
            self._port,
        ]

    def __enter__(self) -> _Server:
        self._process = subprocess.Popen(self._argv)
        ends_s = time.monotonic() + START_S
        while time.monotonic() < ends_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        self._process.kill()
        raise SystemExit(f"{self._argv} did not start")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    sys.exit(main())
