"""Runs functions as agents, many at a time, in any interpreter: it imports the standard library only.

``python function_host.py FILE.py:FUNCTION | MODULE:FUNCTION``

Lines of JSON come in on standard input: ``{"id", "task", "base_url", "session_url", "key", "model"}``
begins an episode, ``{"cancel": id}`` ends it. Lines go out on what was standard output:
``{"id", "result"}`` or ``{"id", "error"}``. What the function prints goes to the log. A function that
blocks the event loop stops all episodes: the last line is then ``{"blocked": id, "error"}``, and the
process ends. ``Host`` is also used by verifiers_host.py.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

Order = Mapping[str, Any]
CLIENTS = ("client", "anthropic_client")
LIBRARIES = {"client": "openai", "clients": "openai", "anthropic_client": "anthropic"}
EPISODE = contextvars.ContextVar("EPISODE", default="")  # whose code runs; tasks inherit it
BLOCKED_S = "REALSYS_BLOCKED_S"  # variable: longest that code may hold up the event loop


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


class LoopWatch:
    """Notices, in a thread, that the event loop does not turn, and tells whose code holds it up.

    It counts its own looks, not the time between them: a process that was stopped as a whole (a suspended
    job) blocks nothing. Code that keeps the interpreter's lock for so long, too, is not noticed.

    Args:
        report: gets the episode, if it is known, and a sentence; called once, in the thread.
    """

    def __init__(self, blocked_s: float, report: Callable[[str, str], None]) -> None:
        self._blocked_s, self._report = blocked_s, report
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._episodes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._loop.set_task_factory(self._task)

    def _task(self, loop: Any, coro: Any, **more: Any) -> Any:
        """Makes a task and notes whose it is."""
        task: Any = asyncio.Task(coro, loop=loop, **more)
        context = more.get("context")
        self._episodes[task] = EPISODE.get() if context is None else context.get(EPISODE, "")
        return task

    def run(self) -> None:
        """Looks until the loop is closed, or blocked."""
        look_s, missed, turned = min(1.0, self._blocked_s / 5), 0, threading.Event()
        turned.set()
        while True:
            if turned.is_set():
                missed = 0
                turned.clear()
                try:
                    self._loop.call_soon_threadsafe(turned.set)
                except RuntimeError:  # closed
                    return
            elif (missed := missed + 1) * look_s >= self._blocked_s:
                culprit = self._culprit()
                if not turned.is_set():  # it went on at the last moment
                    break
            time.sleep(look_s)
        self._report(*culprit)

    def _culprit(self) -> tuple[str, str]:
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames()[self._thread]
        sys.stderr.write(f"the event loop did not turn for {self._blocked_s:g} s:\n")
        traceback.print_stack(frame)
        sys.stderr.flush()
        episode = "" if task is None else self._episodes.get(task, "")
        return episode, (
            f"{place_of(frame)} held up the event loop of its process for {self._blocked_s:g} s "
            "(task.agent_args.blocked_s), and with it all other episodes there: use await, or "
            "asyncio.to_thread"
        )


def place_of(frame: FrameType) -> str:
    """Returns the innermost function outside of packages, else of Python itself: name, file, line, text."""
    stack = traceback.extract_stack(frame)
    kinds = [_kind_of_place(at.filename) for at in stack]
    at = stack[max(i for i, kind in enumerate(kinds) if kind == min(kinds))]
    return f"{at.name} ({at.filename}, line {at.lineno}: {(at.line or '')[:100]})"


def _kind_of_place(filename: str) -> int:
    """Returns 0 for a file of the user's, 1 for a package's, 2 for Python's own or this one."""
    standard = (
        *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")},
        "<frozen",
    )
    if "-packages" + os.sep in filename:
        return 1
    return 2 if filename == __file__ or filename.startswith(standard) else 0


class Host:
    """Episodes that run, by id. Made before what it plays is loaded: what that prints goes to the log, and
    what it reads from standard input is empty.
    """

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0))
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, play: Callable[[Order], Awaitable[Any]]) -> None:
        """Takes orders until standard input ends; ``play`` runs an episode and returns its result."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for line in self._in:
                loop.call_soon_threadsafe(self._take, play, json.loads(line))
            loop.call_soon_threadsafe(ended.set)

        watch = LoopWatch(float(os.environ.get(BLOCKED_S) or 60), self._end_blocked)
        threading.Thread(target=watch.run, daemon=True).start()
        threading.Thread(target=read, daemon=True).start()
        self._report(ready=True)
        await ended.wait()

    def _take(self, play: Callable[[Order], Awaitable[Any]], order: Order) -> None:
        if "cancel" in order:
            if (task := self._running.get(order["cancel"])) is not None:
                task.cancel()
        else:
            context = contextvars.copy_context()
            context.run(EPISODE.set, order["id"])
            one = context.run(asyncio.create_task, self._one(play, order))
            self._running[order["id"]] = one

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

    def _end_blocked(self, episode: str, problem: str) -> None:
        """Tells which episode blocks all, and ends the process, as a blocked loop can't be."""
        if not episode and len(self._running) == 1:
            (episode,) = self._running
        self._report(blocked=episode, error=problem)
        os._exit(1)

    def _report(self, **line: Any) -> None:
        self._out.write(json.dumps(line, default=str) + "\n")


async def main(name: str) -> None:
    """Runs a function's episodes. What is slow to import is imported before the first."""
    host, function = Host(), load(name)
    wanted = wanted_arguments(function)
    for library in {LIBRARIES[name] for name in wanted if name in LIBRARIES}:
        importlib.import_module(library)
    await host.run(partial(play, function, wanted))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    os._exit(0)  # threads of functions may still run
