"""Runs functions as agents, many at a time, in any interpreter: it imports the standard library only.

``python function_host.py FILE.py:FUNCTION | MODULE:FUNCTION``

Lines of JSON come in on standard input: ``{"id", "task", "base_url", "session_url", "key", "model"}``
begins an episode, ``{"cancel": id}`` ends it. Lines go out on what was standard output, one for each
episode, however it ended: ``{"id", "result"}``, ``{"id", "unusable"}`` where the function returned what
no episode can end with, or ``{"id", "error"}``. What the function prints goes to the log.

No episode waits for another: plain functions run in a thread each. Code that does not end when its
episode is cancelled is left behind, and counted in the lines (``left``): whoever started this process
replaces it in time. A function that blocks the event loop stops all episodes: the last line is then
``{"blocked": id, "error"}``, and the process ends. ``Host`` is also used by verifiers_host.py.
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
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType, ModuleType
from typing import Any, TextIO


def _users_code(name: str) -> ModuleType:
    """Loads a file of realsys/api/users_code, which needs nothing of ours, by its path."""
    runners = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ours = os.path.dirname(os.path.dirname(runners))
    path = os.path.join(ours, "api", "users_code", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_realsys_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_numbers, _frames = _users_code("reward_numbers"), _users_code("users_frames")
Order = Mapping[str, Any]
CLIENTS = ("client", "anthropic_client")
LIBRARIES = {"client": "openai", "clients": "openai", "anthropic_client": "anthropic"}
EPISODE = contextvars.ContextVar("EPISODE", default="")  # whose code runs; tasks inherit it
BLOCKED_S = "REALSYS_BLOCKED_S"  # variable: longest that code may hold up the event loop
CANCELLED_BLOCKED_S = 5.0  # the same of an episode that is to end
OBEY_S = 2.0  # for an asynchronous function to end when it is cancelled; then it is left behind
MOST_THREADS = 1024  # of functions that call asyncio.to_thread; they are made as they are needed
MOST_LINE = 16 << 20  # characters of an episode's result
_MEANINGS = ("reward", "rewards", "answer")  # names in a result that are no figures


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


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """True if calling it makes a coroutine: a function, or an object with such a ``__call__``."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(one) for one in (function, call))


def openai_client(order: Order, is_async: bool) -> Any:
    """Makes OpenAI's client, which a plain function can call as it is."""
    openai = importlib.import_module("openai")
    kind = openai.AsyncOpenAI if is_async else openai.OpenAI
    return kind(base_url=order["base_url"], api_key=order["key"])


def anthropic_client(order: Order, is_async: bool) -> Any:
    """Makes Anthropic's client, which a plain function can call as it is."""
    anthropic = importlib.import_module("anthropic")
    root = order["base_url"].removesuffix("/v1")
    kind = anthropic.AsyncAnthropic if is_async else anthropic.Anthropic
    return kind(base_url=root, api_key=order["key"])


PROVIDED: dict[str, Callable[[Order, bool], Any]] = {
    "client": openai_client,
    "anthropic_client": anthropic_client,
    "clients": lambda order, is_async: {
        role: openai_client(one, is_async) for role, one in order["roles"].items()
    },
    "roles": lambda order, _: order["roles"],
    "task": lambda order, _: order["task"],
    "base_url": lambda order, _: order["base_url"],
    "session_url": lambda order, _: order["session_url"],
    "api_key": lambda order, _: order["key"],
    "model": lambda order, _: order["model"],
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
    """Runs one episode; a plain function in a thread of its own."""
    # A decorator's plain function may call an asynchronous one, which it wraps
    wants_async = is_asynchronous(inspect.unwrap(function)) or is_asynchronous(function)
    made = {name: PROVIDED[name](order, wants_async) for name in wanted}
    try:
        call = partial(function, **made)
        result = call() if is_asynchronous(function) else await in_thread(call)
        return await result if inspect.isawaitable(result) else result
    finally:
        opened = [made[name] for name in CLIENTS if name in made]
        for client in (*opened, *made.get("clients", {}).values()):
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing


_threads_left: set[threading.Thread] = set()  # whose episodes were cancelled, and that still run


async def in_thread(call: Callable[[], Any]) -> Any:
    """Calls in a thread of its own: as many as there are episodes, and one that hangs keeps no place."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context, is_over = contextvars.copy_context(), False

    def resolve(result: Any, error: BaseException | None) -> None:
        nonlocal is_over
        is_over = True
        _threads_left.discard(thread)
        if not ended.done():
            ended.set_result((result, error))  # as a value: a future takes no StopIteration

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(call)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, result, error)

    thread = threading.Thread(target=run, daemon=True, name=EPISODE.get() or "episode")
    thread.start()
    try:
        result, error = await ended
    except asyncio.CancelledError:
        if not is_over:
            _threads_left.add(thread)
        raise
    if error is not None:
        raise error
    return result


def usable(result: Any) -> Any:
    """Returns what a function returned as JSON's values: None, a text, a number, or an object of these.

    Raises:
        ValueError: it is nothing of these; the text begins with the value.
    """
    if result is None or issubclass(type(result), str):
        return None if result is None else str.__str__(result)
    if not isinstance(result, Mapping):
        return _numbers.python_number(result)
    made: dict[str, Any] = {}
    for key, value in result.items():
        name = str(key)
        if name in _MEANINGS:
            try:
                made[name] = _meant(name, value)
            except ValueError as error:
                shown = _numbers.shown_value(result)
                raise ValueError(f"{shown}, whose {name} is {error}") from None
        elif _numbers.is_number(value):
            made[name] = _numbers.python_number(value)
    return made


def _meant(name: str, value: Any) -> Any:
    """Returns a reward, rewards by role, or an answer to score."""
    if value is None or (name == "answer" and issubclass(type(value), str)):
        return None if value is None else str.__str__(value)
    if name == "rewards" and isinstance(value, Mapping):
        return {str(role): _numbers.python_number(one) for role, one in value.items()}
    return _numbers.python_number(value)


class LoopWatch:
    """Notices, in a thread, that the event loop does not turn, and tells whose code holds it up.

    It counts its own looks, not the time between them: a process that was stopped as a whole (a suspended
    job) blocks nothing. Code that keeps the interpreter's lock for so long, too, is not noticed.

    Args:
        report: gets the episode, if it is known, and a sentence; called once, in the thread.
        cancelled: episodes that are to end, which may not hold up the others any longer.
    """

    def __init__(
        self, blocked_s: float, report: Callable[[str, str], None], cancelled: Set[str]
    ) -> None:
        self._blocked_s, self._report, self._cancelled = blocked_s, report, cancelled
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
            else:
                missed += 1
                episode, frame = self._culprit()
                limit_s = self._blocked_s
                if episode in self._cancelled:
                    limit_s = min(CANCELLED_BLOCKED_S, limit_s)
                # It may have gone on at the last moment
                if missed * look_s >= limit_s and not turned.is_set():
                    break
            time.sleep(look_s)
        self._report(episode, self._problem(episode, frame, missed * look_s))

    def _culprit(self) -> tuple[str, FrameType]:
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames()[self._thread]
        return "" if task is None else self._episodes.get(task, ""), frame

    def _problem(self, episode: str, frame: FrameType, blocked_s: float) -> str:
        sys.stderr.write(f"the event loop did not turn for {blocked_s:g} s:\n")
        traceback.print_stack(frame)
        sys.stderr.flush()
        if episode in self._cancelled:
            return f"{place_of(frame)} did not end when cancelled: {episode}"
        return (
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
    """Episodes that run, by id.

    Args:
        orders, lines: what comes in and what goes out, see the top of this file.
    """

    def __init__(self, orders: TextIO, lines: TextIO) -> None:
        self._in, self._out = orders, lines
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}  # until they are reported
        self._tasks_left: set[asyncio.Task[dict[str, Any]]] = set()  # cancelled, and still there
        self._cancelled: set[str] = set()  # of them those that are to end; a thread adds to it
        self._own: tuple[str, ...] = ()  # folders of the user's code, where it is installed

    @classmethod
    def of_this_process(cls) -> Host:
        """Takes standard input and output. Called before what it plays is loaded: what that prints goes to
        the log, and what it reads from standard input is empty."""
        orders, lines = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)
        return cls(orders, lines)

    def use_frames_of(self, module: str) -> None:
        """Counts the package of a module as the user's own in errors, though it may be installed."""
        top = sys.modules.get(module.partition(".")[0])
        file = getattr(top, "__file__", None) or ""
        if file:
            self._own = (os.path.dirname(file) + os.sep if hasattr(top, "__path__") else file,)

    async def run(self, play: Callable[[Order], Awaitable[Any]]) -> None:
        """Takes orders until standard input ends; ``play`` runs an episode and returns its result."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "to_thread"))
        blocked_s = float(os.environ.get(BLOCKED_S) or 60)
        watch = LoopWatch(blocked_s, self._end_blocked, self._cancelled)

        def read() -> None:
            for line in self._in:
                order = json.loads(line)
                if "cancel" in order:
                    self._cancelled.add(order["cancel"])
                loop.call_soon_threadsafe(self._take, play, order)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch.run, daemon=True).start()
        threading.Thread(target=read, daemon=True).start()
        self._report(ready=True)
        await ended.wait()

    def _take(self, play: Callable[[Order], Awaitable[Any]], order: Order) -> None:
        if "cancel" in order:
            self._cancel(order["cancel"])
            return
        context = contextvars.copy_context()
        context.run(EPISODE.set, order["id"])
        task = context.run(asyncio.create_task, self._one(play, order))
        self._running[order["id"]] = task
        # Not within the task: one that is cancelled before its first step runs nothing of itself
        task.add_done_callback(partial(self._ended, order["id"]))

    def _cancel(self, id_: str) -> None:
        """Ends an episode. Its line comes in any case: whoever gets none ends the process of all."""
        if (task := self._running.get(id_)) is None:
            self._cancelled.discard(id_)
            return

        def leave() -> None:
            if self._running.get(id_) is task:
                self._tasks_left.add(task)
                self._settle(id_, {"error": "cancelled"})

        task.cancel()
        asyncio.get_running_loop().call_later(OBEY_S, leave)

    async def _one(self, play: Callable[[Order], Awaitable[Any]], order: Order) -> dict[str, Any]:
        try:
            result = await play(order)
        except asyncio.CancelledError:
            return {"error": "cancelled"}
        except BaseException as error:
            traceback.print_exc()
            return {"error": _frames.shown_error(error, own=self._own)[:2000]}
        try:
            return {"result": usable(result)}
        except ValueError as error:
            return {"unusable": str(error)}
        except Exception as error:  # an object of the user's may raise anything
            return {"unusable": _frames.shown_error(error, own=self._own)[:2000]}

    def _ended(self, id_: str, task: asyncio.Task[dict[str, Any]]) -> None:
        self._tasks_left.discard(task)
        if self._running.get(id_) is task:
            self._settle(id_, {"error": "cancelled"} if task.cancelled() else task.result())

    def _settle(self, id_: str, line: dict[str, Any]) -> None:
        del self._running[id_]
        self._cancelled.discard(id_)
        self._report(id=id_, **line, left=len(self._tasks_left) + len(_threads_left))

    def _end_blocked(self, episode: str, problem: str) -> None:
        """Tells which episode blocks all, and ends the process, as a blocked loop can't be."""
        if not episode and len(self._running) == 1:
            (episode,) = self._running
        self._report(blocked=episode, error=problem)
        os._exit(1)

    def _report(self, **line: Any) -> None:
        text = json.dumps(line)
        if len(text) > MOST_LINE:
            what = f"its result has {len(text)} characters, and may have {MOST_LINE}"
            text = json.dumps({"id": line.get("id"), "unusable": what})
        self._out.write(text + "\n")


async def main(name: str) -> None:
    """Runs a function's episodes. What is slow to import is imported before the first."""
    host = Host.of_this_process()
    try:
        function = load(name)
        wanted = wanted_arguments(function)
        for library in {LIBRARIES[name] for name in wanted if name in LIBRARIES}:
            importlib.import_module(library)
    except Exception as error:  # the last line of the log is what is told of it
        traceback.print_exc()
        sys.stderr.write(" ".join(_frames.shown_error(error).split()) + "\n")
        sys.stderr.flush()
        os._exit(1)  # also where what was imported has started threads
    host.use_frames_of(getattr(function, "__module__", ""))
    await host.run(partial(play, function, wanted))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    os._exit(0)  # threads of functions may still run
