"""Runs functions as agents, many at a time, in any interpreter: it imports the standard library only.

``python function_host.py FILE.py:FUNCTION | MODULE:FUNCTION``

Lines of JSON come in on standard input: ``{"id", "task", "base_url", "session_url", "key", "model"}``
begins an episode, ``{"cancel": id}`` ends it. Lines go out on what was standard output:
``{"id", "result"}`` or ``{"id", "error"}``. What the function prints goes to the log. ``Host`` is also
used by verifiers_host.py.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

Order = Mapping[str, Any]
CLIENTS = ("client", "anthropic_client")


def load(name: str) -> Callable[..., Any]:
    """Imports ``FILE.py:NAME`` or ``MODULE:NAME``."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        place = os.path.splitext(os.path.basename(place))[0]
    else:
        sys.path.insert(0, os.getcwd())
    function: Callable[..., Any] = getattr(importlib.import_module(place), attribute)
    return function


def openai_client(order: Order) -> Any:
    """Makes OpenAI's asynchronous client."""
    openai = importlib.import_module("openai")
    return openai.AsyncOpenAI(base_url=order["base_url"], api_key=order["key"])


def anthropic_client(order: Order) -> Any:
    """Makes Anthropic's asynchronous client."""
    anthropic = importlib.import_module("anthropic")
    root = order["base_url"].removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key=order["key"])


PROVIDED: dict[str, Callable[[Order], Any]] = {
    "client": openai_client,
    "anthropic_client": anthropic_client,
    "clients": lambda order: {r: openai_client(one) for r, one in order["roles"].items()},
    "roles": lambda order: order["roles"],
    "task": lambda order: order["task"],
    "base_url": lambda order: order["base_url"],
    "session_url": lambda order: order["session_url"],
    "api_key": lambda order: order["key"],
    "model": lambda order: order["model"],
}


def wanted_arguments(function: Callable[..., Any]) -> list[str]:
    """Returns which of ``PROVIDED`` the function's parameters name; TypeError if another has no default."""
    wanted = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_optional = parameter.default is not parameter.empty
        if name in PROVIDED:
            wanted.append(name)
        elif not is_optional and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"the function's parameter {name!r} is none of {', '.join(PROVIDED)}")
    return wanted


async def play(function: Callable[..., Any], wanted: Sequence[str], order: Order) -> Any:
    """Runs one episode; a plain function in a thread."""
    made = {name: PROVIDED[name](order) for name in wanted}
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**made)
        return await asyncio.to_thread(function, **made)
    finally:
        opened = [made[name] for name in CLIENTS if name in made]
        for client in (*opened, *made.get("clients", {}).values()):
            await client.close()


class Host:
    """Episodes that run, by id. Made before what it plays is loaded: what that prints goes to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, play: Callable[[Order], Awaitable[Any]]) -> None:
        """Takes orders until standard input ends; ``play`` runs an episode and returns its result."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(self._take, play, json.loads(line))
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        self._report(ready=True)
        await ended.wait()

    def _take(self, play: Callable[[Order], Awaitable[Any]], order: Order) -> None:
        if "cancel" in order:
            if (task := self._running.get(order["cancel"])) is not None:
                task.cancel()
        else:
            self._running[order["id"]] = asyncio.create_task(self._one(play, order))

    async def _one(self, play: Callable[[Order], Awaitable[Any]], order: Order) -> None:
        try:
            self._report(id=order["id"], result=await play(order))
        except asyncio.CancelledError:
            self._report(id=order["id"], error="cancelled")
        except BaseException as error:
            traceback.print_exc()
            self._report(id=order["id"], error=f"{type(error).__name__}: {error}"[:2000])
        finally:
            self._running.pop(order["id"], None)

    def _report(self, **line: Any) -> None:
        self._out.write(json.dumps(line, default=str) + "\n")


async def main(name: str) -> None:
    """Runs a function's episodes."""
    host, function = Host(), load(name)
    await host.run(partial(play, function, wanted_arguments(function)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    os._exit(0)  # threads of functions may still run
